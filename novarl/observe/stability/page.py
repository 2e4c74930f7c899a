"""The table of alerts in docs/stability.md.

python -m novarl.observe.stability.page  # prints it; a test compares
"""

from __future__ import annotations

from novarl.observe.stability.alerts import Rule
from novarl.observe.stability.faults import PLUMBING
from novarl.observe.stability.rules import TRAINING


def table(rules: tuple[Rule, ...]) -> str:
    """One row for each alert."""
    rows = [("alert", "cause", "raised when", "reads", "what to try"), ("---",) * 5]
    for rule in rules:
        critical = " (critical)" if rule.severity == "critical" else ""
        reads = ", ".join(f"`{name}`" for name in rule.reads)
        rows.append((f"`{rule.name}`{critical}", rule.cause, rule.when, reads, rule.fix))
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in rows)


def tables() -> str:
    """The tables of alerts about metrics and about plumbing."""
    return f"### About metrics\n\n{table(TRAINING)}\n### About sampler and learner\n\n{table(PLUMBING)}"


if __name__ == "__main__":
    print(tables(), end="")
