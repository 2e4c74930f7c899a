"""A reward model from Python. `python -m novarl.trainer.rm key=value ...` is `novarl rm ...`."""

from __future__ import annotations

import sys

from novarl.trainer.base import Trainer


class RewardModel(Trainer):
    """A reward model: `data` holds pairs, a chosen and a rejected answer each, or answers with a label."""

    kind = "rm"


if __name__ == "__main__":
    from novarl.cli import main

    raise SystemExit(main(["rm", *sys.argv[1:]], program="python -m novarl.trainer.rm"))
