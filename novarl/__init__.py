"""NovaRL: reinforcement learning for language models that people can trust, read and run.

    import novarl
    trainer = novarl.RL(model="tiny", prompts="sort", algo="grpo", steps=40, run_dir="runs/x")
    trainer.run()

`RL`, `SFT`, `DPO` and `RewardModel` train; `load_run` reads what a run has written; `algorithms` lists what there is.
`NovaError` is every error that a user can fix.
Importing novarl loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from novarl.core.version import VERSION as __version__

if TYPE_CHECKING:
    from novarl.algos.named import algorithms as algorithms
    from novarl.core.errors import NovaError as NovaError
    from novarl.observe.run import LoadedRun as LoadedRun, load_run as load_run
    from novarl.trainer.dpo import DPO as DPO
    from novarl.trainer.ppo import RL as RL
    from novarl.trainer.rm import RewardModel as RewardModel
    from novarl.trainer.sft import SFT as SFT

__all__ = ["DPO", "RL", "SFT", "NovaError", "RewardModel", "__version__", "algorithms", "load_run"]


PLACES = {
    "RL": "novarl.trainer.ppo",
    "SFT": "novarl.trainer.sft",
    "DPO": "novarl.trainer.dpo",
    "RewardModel": "novarl.trainer.rm",
    "NovaError": "novarl.core.errors",
    "load_run": "novarl.observe.run",
    "algorithms": "novarl.algos.named",
}


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module 'novarl' has no attribute {name!r}")
    return getattr(importlib.import_module(PLACES[name]), name)
