"""A reward model from Python. `python -m novarl.trainer.rm key=value ...` is `novarl rm ...`."""

from __future__ import annotations

import sys
from typing import Any

from novarl.trainer.base import Trainer, data_keys


class RewardModel(Trainer):
    """A reward model: `data` holds pairs, a chosen and a rejected answer each, or answers with a label."""

    kind = "rm"

    def _keys(self, settings: dict[str, Any]) -> dict[str, Any]:
        return data_keys(settings)


if __name__ == "__main__":
    from novarl.cli import main

    raise SystemExit(main(["rm", *sys.argv[1:]], program="python -m novarl.trainer.rm"))
