"""What an alert says, and what a row of the table of alerts consists of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from novarl.observe.stability.window import Window

Severity = Literal["warning", "critical"]
Kind = Literal["training", "plumbing", "setup"]


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert: the rule's name, the named cause, the evidence with numbers, what to try, and the step."""

    alert: str
    cause: str
    evidence: str
    fix: str
    severity: Severity
    step: int = 0

    @property
    def message(self) -> str:
        """One line for the console."""
        return f"{self.evidence}. {self.fix}."


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table of alerts.

    name      the alert's name
    kind      training: learning goes wrong; plumbing: sampler and learner disagree; setup: the run cannot learn
    cause     the named cause
    reads     the metrics or columns that it reads
    when      the condition in words, with its thresholds
    fix       what to try
    history   updates (or steps, for rules about groups and answers) before it may speak
    severity  critical: the run is damaged or learns nothing; warning: it may be
    check     the evidence, or None. Rules without it are checked elsewhere: over whole runs, or over rollouts
    """

    name: str
    kind: Kind
    cause: str
    reads: tuple[str, ...]
    when: str
    fix: str
    history: int = 1
    severity: Severity = "warning"
    check: Callable[[Window], str | None] | None = None

    def alert(self, evidence: str, step: int) -> Alert:
        """An alert of this rule."""
        return Alert(self.name, self.cause, evidence, self.fix, self.severity, step)
