"""The parts of an online run."""

from __future__ import annotations

from dataclasses import dataclass

from novarl.compose.resolve import RLPlan
from novarl.config.tree import RLConfig
from novarl.distributed.ranks import Ranks
from novarl.learn.credit import CreditRule
from novarl.learn.objective import Objective
from novarl.learn.scorer import Scorer
from novarl.models.implicit import ImplicitModel
from novarl.models.load import Policy
from novarl.run.judge import Judge
from novarl.run.sampler import Sampler


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an online run, before its first phase."""

    config: RLConfig
    plan: RLPlan
    ranks: Ranks
    policy: Policy
    scorer: Scorer
    sampler: Sampler
    judge: Judge
    objective: Objective
    credit: CreditRule
    process_model: ImplicitModel | None
