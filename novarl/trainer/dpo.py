"""Preference optimization from Python. `python -m novarl.trainer.dpo key=value ...` is `novarl dpo ...`."""

from __future__ import annotations

import sys
from typing import Any

from novarl.trainer.base import Trainer, data_keys


class DPO(Trainer):
    """Direct preference optimization and its relatives (`loss`): `data` holds pairs, a chosen and a rejected answer
    each, or answers with a label."""

    kind = "dpo"

    def _keys(self, settings: dict[str, Any]) -> dict[str, Any]:
        return data_keys(settings)


if __name__ == "__main__":
    from novarl.cli import main

    raise SystemExit(main(["dpo", *sys.argv[1:]], program="python -m novarl.trainer.dpo"))
