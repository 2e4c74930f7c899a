"""Reinforcement learning from Python. `python -m novarl.trainer.ppo key=value ...` is `novarl rl algo=ppo ...`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, ClassVar

from novarl.trainer.base import Trainer, data_keys


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
    names: ClassVar[Mapping[str, str]] = {"prompts": "data", "env": "rollout.env_path"}

    def _keys(self, settings: dict[str, Any]) -> dict[str, Any]:
        return data_keys(settings)


if __name__ == "__main__":
    from novarl.cli import main

    raise SystemExit(main(["rl", "algo=ppo", *sys.argv[1:]]))
