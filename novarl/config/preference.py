"""Training on preferences: the trees of `novarl dpo` and `novarl rm`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from novarl.config.base import TrainConfig
from novarl.config.parts import Above0, AtLeast0, Count, Log, Rows, Text, conflict

Smoothing = Annotated[float, Field(ge=0.0, lt=0.5)]


class PreferenceConfig(TrainConfig):
    """What both have in common: preference rows, and how often to go through them."""

    chosen_key: Text | None = None
    """Column with the chosen answer. null: `chosen`."""
    rejected_key: Text | None = None
    """Column with the rejected answer. null: `rejected`."""
    completion_key: Text | None = None
    """Column with a labeled answer. null: detected by common names."""
    label_key: Text | None = None
    """Column with the label (good or bad) of an answer or text. null: `label`."""
    text_key: Text | None = None
    """Column with a labeled text. null: `text`."""
    on_long: Literal["truncate", "keep_end", "refuse"] = "truncate"
    """What to do with rows longer than `max_length`. truncate: shorten the prompt at its start (keeping half of
    `max_length`), then the answer at its end; keep_end: the same, but texts without a prompt are shortened at the
    start; refuse: skip the row. All are counted."""
    steps: Count | None = None
    """Number of optimizer updates. null: as many as `epochs` takes."""
    epochs: Annotated[float, Field(gt=0.0)] | None = None
    """Number of passes over the rows. null: 1, unless `steps` is set."""
    batch_size: Count = 32
    """Pairs, or labeled answers, per update."""
    label_smoothing: Smoothing = 0.0
    """Assumed fraction of wrong labels."""
    log: Log = Log()
    eval: Rows = Rows()

    def _refuse_unused(self, name: str, given: bool, losses: tuple[str, ...], loss: str) -> None:
        """Refuse a key that only other losses use."""
        if given and loss not in losses:
            raise conflict(name, f"loss={loss} does not use it", f"remove it, or use loss={' or '.join(losses)}")


class DPOConfig(PreferenceConfig):
    """Direct preference optimization: trains a policy on pairs or labeled answers without a reward model."""

    kind: ClassVar[str] = "dpo"

    loss: Literal["sigmoid", "ipo", "dpop", "robust", "hinge", "simpo", "orpo", "kto"] = "sigmoid"
    """The loss. sigmoid is standard DPO; simpo and orpo need no reference model; kto uses labeled answers and treats a
    pair as two."""
    beta: Above0 | None = None
    """Scale of the log-ratio to the reference (simpo: of the mean log-probability; orpo: weight of the odds ratio).
    null: 0.1, or 2 for simpo."""
    penalty: AtLeast0 | None = None
    """dpop: penalty per nat by which the chosen answer becomes less likely than under the reference. null: 50."""
    gamma: AtLeast0 | None = None
    """simpo: target margin between the chosen and the rejected reward. null: 0.5."""
    desirable_weight: Above0 | None = None
    """kto: weight of good answers. null: 1."""
    undesirable_weight: Above0 | None = None
    """kto: weight of bad answers. null: 1."""

    @model_validator(mode="after")
    def _loss_reads_its_keys(self) -> DPOConfig:
        only = {"penalty": "dpop", "gamma": "simpo", "desirable_weight": "kto", "undesirable_weight": "kto"}
        for name, loss in only.items():
            self._refuse_unused(name, getattr(self, name) is not None, (loss,), self.loss)
        smoothed = ("sigmoid", "robust", "dpop", "simpo")
        self._refuse_unused("label_smoothing", self.label_smoothing > 0.0, smoothed, self.loss)
        if self.loss == "robust" and self.label_smoothing == 0.0:
            raise conflict(
                "label_smoothing",
                "loss=robust needs the fraction of wrong labels",
                "set label_smoothing, for example to 0.1, or use loss=sigmoid",
            )
        return self


class RMConfig(PreferenceConfig):
    """A reward model, trained on pairs or labeled answers."""

    kind: ClassVar[str] = "rm"

    loss: Literal["bt", "bce", "implicit_ce", "implicit_dpo", "implicit_kto"] = "bt"
    """The loss. bt: pairs, with a scalar head; bce: labels (a pair counts as two), with a scalar head; implicit_dpo
    (pairs), implicit_ce and implicit_kto (labels): the log-ratio to the initial model, which also scores every
    token."""
    beta: Above0 | None = None
    """implicit losses: scale of the log-ratio. null: 0.05."""
    margin: AtLeast0 = 0.0
    """bt, implicit_dpo: target margin between the chosen and the rejected reward, for rows without their own
    `margin`."""
    centring: AtLeast0 = 0.0
    """bt: weight of (chosen + rejected)^2, which keeps rewards centered around 0. 0.01 is common."""

    @model_validator(mode="after")
    def _loss_reads_its_keys(self) -> RMConfig:
        self._refuse_unused("beta", self.beta is not None, ("implicit_ce", "implicit_dpo", "implicit_kto"), self.loss)
        self._refuse_unused("margin", self.margin > 0.0, ("bt", "implicit_dpo"), self.loss)
        self._refuse_unused("centring", self.centring > 0.0, ("bt",), self.loss)
        smoothed = ("bt", "bce", "implicit_ce", "implicit_dpo")
        self._refuse_unused("label_smoothing", self.label_smoothing > 0.0, smoothed, self.loss)
        return self
