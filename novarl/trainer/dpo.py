"""Preference optimization from Python. `python -m novarl.trainer.dpo key=value ...` is `novarl dpo ...`."""

from __future__ import annotations

import sys

from novarl.trainer.base import Trainer


class DPO(Trainer):
    """Direct preference optimization and its relatives (`loss`): `data` holds pairs, or answers with a label."""

    kind = "dpo"


if __name__ == "__main__":
    from novarl.cli import main

    raise SystemExit(main(["dpo", *sys.argv[1:]], program="python -m novarl.trainer.dpo"))
