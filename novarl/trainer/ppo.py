"""Reinforcement learning from Python. `python -m novarl.trainer.ppo key=value ...` is `novarl rl algo=ppo ...`."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from novarl.trainer.base import Trainer

if TYPE_CHECKING:
    from novarl.loops.evaluate import Evaluation
    from novarl.run.judge import Judge


class RL(Trainer):
    """Reinforcement learning.

    model     "tiny" or "small", a directory, a hub id, a transformers model, or an nn.Module (`tokenizer=` with it)
    prompts   a built-in task, a file or data set, a datasets.Dataset, or a list of dictionaries or strings
    reward    a function, several, or {name: function}; "file.py:name"; a built-in reward's name
    env       what answers the policy: "file.py", or a class that makes an `Env`
    engine    what samples: an `Engine`, or a function that makes one for a policy
    algo      an algorithm by name (`novarl.algorithms()`)
    """

    kind = "rl"
    names: ClassVar[Mapping[str, str]] = {"env": "rollout.env_path"}

    def _judge_training_rows(self, training: Any) -> Callable[[], Evaluation]:
        rows = training.rows.train
        warnings.warn(f"no held-out rows: the score is of {len(rows)} training rows", UserWarning, stacklevel=3)
        judge: Judge = dataclasses.replace(training.judge, prompts=rows)
        return judge


if __name__ == "__main__":
    from novarl.cli import main

    raise SystemExit(main(["rl", "algo=ppo", *sys.argv[1:]], program="python -m novarl.trainer.ppo"))
