"""`novarl` with every advantage set to 0: what a benchmark of learning must not call learning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from novarl import cli
from novarl.core.types import Credit
from novarl.learn.credit import CreditRule


def main() -> int:
    """Run the command line with a credit rule that gives none."""
    original = CreditRule.__call__

    def without(self: CreditRule, *given: Any, **named: Any) -> Any:
        credit, record, ema = original(self, *given, **named)
        nothing: Credit = replace(credit, advantage=torch.zeros_like(credit.advantage))
        return nothing, record, ema

    CreditRule.__call__ = without  # type: ignore[method-assign]
    return cli.main()


if __name__ == "__main__":
    raise SystemExit(main())
