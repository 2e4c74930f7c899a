"""Learning from preferences: the trees of `novarl dpo` and `novarl rm`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from novarl.config.base import TrainConfig
from novarl.config.parts import Above0, AtLeast0, Count, Log, Rows, Text, refuse

Smoothing = Annotated[float, Field(ge=0.0, lt=0.5)]

_COLUMNS = ("chosen_key", "rejected_key", "label_key")


class PreferenceConfig(TrainConfig):
    """What both have in common: rows that say what is better, and how often to go through them."""

    chosen_key: Text | None = None
    """The column with the better answer; null: `chosen`."""
    rejected_key: Text | None = None
    """The column with the worse answer; null: `rejected`."""
    completion_key: Text | None = None
    """The column with an answer that has a label; null: found by its usual names."""
    label_key: Text | None = None
    """The column that says whether an answer or a text is good; null: `label`."""
    text_key: Text | None = None
    """The column with a text that has a label; null: `text`."""
    on_long: Literal["truncate", "keep_end", "refuse"] = "truncate"
    """A row longer than `max_length`: its prompt loses its beginning (half of `max_length` is kept), then its answer
    its end; keep_end: the same, but a text without a prompt loses its beginning; refuse: it is left out. Counted
    whichever it is."""
    steps: Count | None = None
    """Optimiser updates; null: as many as `epochs` takes."""
    epochs: Annotated[float, Field(gt=0.0)] | None = None
    """How often to go through the rows; null: once, unless `steps` is given."""
    batch_size: Count = 32
    """Pairs, or labelled answers, in an update."""
    label_smoothing: Smoothing = 0.0
    """The share of rows that are taken to say the opposite of the truth."""
    log: Log = Log()
    eval: Rows = Rows()

    @model_validator(mode="after")
    def _rows_and_length(self) -> PreferenceConfig:
        refuse(
            self.steps is not None and self.epochs is not None,
            "epochs",
            f"steps={self.steps} and epochs={self.epochs} both say how long to train",
            "leave one of them out",
        )
        for name in _COLUMNS:
            column = getattr(self, name)
            refuse(
                self.task is not None and column is not None,
                name,
                f"{name}={column} names a column of a data file, yet the rows come from task={self.task}",
                "leave it out, or give data instead of task",
            )
        return self

    def _refuse_unused(self, name: str, given: bool, losses: tuple[str, ...], loss: str) -> None:
        """Refuse a key that only other losses read."""
        refuse(
            given and loss not in losses,
            name,
            f"loss={loss} does not read it",
            f"leave it out, or use loss={' or '.join(losses)}",
        )


class DPOConfig(PreferenceConfig):
    """Direct preference optimisation: a policy learns from pairs, or from labelled answers, without a reward model."""

    kind: ClassVar[str] = "dpo"

    loss: Literal["sigmoid", "ipo", "dpop", "robust", "hinge", "simpo", "orpo", "kto"] = "sigmoid"
    """sigmoid is DPO itself; simpo and orpo need no reference; kto learns from labelled answers, and takes a pair as
    two."""
    beta: Above0 | None = None
    """How much a nat of log-ratio to the reference is worth (simpo: of log-probability a token; orpo: the weight of
    the odds ratio); null: 0.1, simpo 2."""
    penalty: AtLeast0 | None = None
    """dpop: what each nat costs by which the chosen answer falls below the reference; null: 50."""
    gamma: AtLeast0 | None = None
    """simpo: what the chosen answer's reward must be ahead by; null: 0.5."""
    desirable_weight: Above0 | None = None
    """kto: the weight of good answers; null: 1."""
    undesirable_weight: Above0 | None = None
    """kto: the weight of bad answers; null: 1."""

    @model_validator(mode="after")
    def _loss_reads_its_keys(self) -> DPOConfig:
        self._refuse_unused("penalty", self.penalty is not None, ("dpop",), self.loss)
        self._refuse_unused("gamma", self.gamma is not None, ("simpo",), self.loss)
        self._refuse_unused("desirable_weight", self.desirable_weight is not None, ("kto",), self.loss)
        self._refuse_unused("undesirable_weight", self.undesirable_weight is not None, ("kto",), self.loss)
        smoothed = ("sigmoid", "robust", "dpop", "simpo")
        self._refuse_unused("label_smoothing", self.label_smoothing > 0.0, smoothed, self.loss)
        refuse(
            self.loss == "robust" and self.label_smoothing == 0.0,
            "label_smoothing",
            "loss=robust corrects for labels that are wrong, and label_smoothing=0 says that none is",
            "say how many are, as in label_smoothing=0.1, or use loss=sigmoid",
        )
        return self


class RMConfig(PreferenceConfig):
    """A reward model: from pairs or labelled answers to a number that says how good an answer is."""

    kind: ClassVar[str] = "rm"

    loss: Literal["bt", "bce", "implicit_ce", "implicit_dpo", "implicit_kto"] = "bt"
    """bt: pairs, by a scalar head; bce: labels (a pair counts as two), by a scalar head; implicit_dpo (pairs),
    implicit_ce and implicit_kto (labels): by the log-ratio to the starting model, which scores every token besides."""
    beta: Above0 | None = None
    """implicit losses: how much a nat of log-ratio is worth; null: 0.05."""
    margin: AtLeast0 = 0.0
    """bt, implicit_dpo: what the chosen answer must be ahead by, where the row has no `margin` of its own."""
    centring: AtLeast0 = 0.0
    """bt: the weight of (chosen + rejected)^2, which keeps rewards around 0; 0.01 is usual."""

    @model_validator(mode="after")
    def _loss_reads_its_keys(self) -> RMConfig:
        self._refuse_unused("beta", self.beta is not None, ("implicit_ce", "implicit_dpo", "implicit_kto"), self.loss)
        self._refuse_unused("margin", self.margin > 0.0, ("bt", "implicit_dpo"), self.loss)
        self._refuse_unused("centring", self.centring > 0.0, ("bt",), self.loss)
        smoothed = ("bt", "bce", "implicit_ce", "implicit_dpo")
        self._refuse_unused("label_smoothing", self.label_smoothing > 0.0, smoothed, self.loss)
        return self
