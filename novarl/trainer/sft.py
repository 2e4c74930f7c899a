"""Supervised fine-tuning from Python. `python -m novarl.trainer.sft key=value ...` is `novarl sft ...`."""

from __future__ import annotations

import sys

from novarl.trainer.base import Trainer


class SFT(Trainer):
    """Supervised fine-tuning: `data` is a built-in task, a file or data set, a datasets.Dataset, or a list of
    dictionaries with messages, or with a prompt and a completion."""

    kind = "sft"


if __name__ == "__main__":
    from novarl.cli import main

    raise SystemExit(main(["sft", *sys.argv[1:]], program="python -m novarl.trainer.sft"))
