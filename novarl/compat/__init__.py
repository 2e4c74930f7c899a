"""Front ends with the class names and signatures of other projects' documents, over NovaRL's own parts.

    from novarl.compat import PolicyModel, PPOTrainer, ToyRewardModel, set_seed        # RLHF Systems Kit
    from novarl.compat import AdaptiveKLController, MultiObjectiveOptimizer            # enhanced RL2
    from novarl.compat import ExperimentTracker                                        # enhanced RL2

docs/compat.md lists what each one is here and how it differs. Importing this package loads neither torch nor
transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from novarl.compat.kit import (
        PolicyModel as PolicyModel,
        PPOTrainer as PPOTrainer,
        ToyRewardModel as ToyRewardModel,
        set_seed as set_seed,
    )
    from novarl.compat.rl2 import (
        AdaptiveKLController as AdaptiveKLController,
        ConstraintOptimizer as ConstraintOptimizer,
        MultiObjectiveOptimizer as MultiObjectiveOptimizer,
    )
    from novarl.compat.rl2_advantages import (
        compute_advantages_unified as compute_advantages_unified,
    )
    from novarl.compat.rl2_tracking import (
        ExperimentConfig as ExperimentConfig,
        ExperimentTracker as ExperimentTracker,
    )

_MODULES = {
    "PolicyModel": "kit",
    "ToyRewardModel": "kit",
    "PPOTrainer": "kit",
    "set_seed": "kit",
    "AdaptiveKLController": "rl2",
    "ConstraintOptimizer": "rl2",
    "MultiObjectiveOptimizer": "rl2",
    "compute_advantages_unified": "rl2_advantages",
    "ExperimentConfig": "rl2_tracking",
    "ExperimentTracker": "rl2_tracking",
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'novarl.compat' has no attribute {name!r}")
    return getattr(importlib.import_module(f"novarl.compat.{_MODULES[name]}"), name)
