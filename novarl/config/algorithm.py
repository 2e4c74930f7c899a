"""The sections that change parts of an algorithm: advantages, surrogate, correction, regularizers, aggregation.

`null` means that the algorithm sets the value.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from novarl.algos import axes
from novarl.algos.axes import CORRECTIONS, default
from novarl.config.parts import Above0, AtLeast0, Beta, Count, Node, OwnFunction, Share, Text, Whole, conflict


class Advantage(Node):
    """Advantage estimation: the baseline that an answer's reward is compared with."""

    estimator: axes.EstimatorName | OwnFunction | None = None
    """group, leave_one_out, opo, reinforce_pp: the other answers to the prompt; mean: the batch; ema: the past; scst:
    the greedy answer; constant: a number; gae, vtrace, retrace, td_lambda, n_step, clipped_is, monte_carlo: state
    values along the answer; prime: rewards of tokens; file.py:name: a function of your own; null: the algorithm's."""
    norm_std: bool | None = None
    """Divide by the standard deviation of the prompt's rewards; null: the algorithm's."""
    ema_beta: Beta = default("adv.ema_beta")
    """With estimator=ema: the weight of the past."""
    constant: float = default("adv.constant")
    """With estimator=constant: what is subtracted from every reward."""
    values: axes.ValueSource | None = None
    """Who supplies the values of states: a learned critic, or fresh continuations from the steps of an answer; null:
    the algorithm's."""
    gamma: Share | None = None
    """Discount factor per step. Used by estimators with state values. null: set by the algorithm."""
    lam: Share | None = None
    """gae, vtrace, retrace, td_lambda: 0 relies on the value estimates, 1 on the rewards; null: the algorithm's."""
    n: Count = default("adv.n")
    """With estimator=n_step: how many rewards before the value."""
    rho_max: Above0 = default("adv.rho_max")
    """vtrace, clipped_is: the largest weight pi_old / mu of a step."""
    c_max: Above0 = default("adv.c_max")
    """vtrace, retrace: the largest weight of what follows a step."""
    is_level: Literal["decision", "trajectory"] = default("adv.is_level")
    """With estimator=clipped_is: a weight for every step and what follows it, or one for the whole answer, the product
    of all its ratios."""
    bootstrap_truncated: bool = False
    """Use the critic's value at the end of a truncated answer. false: the limit counts as part of the task and the
    reward judges the answer as it is."""
    whiten: bool | None = None
    """Normalize the advantages of all trained tokens to mean 0 and variance 1. null: set by the algorithm."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Advantage:
        chosen = self.estimator
        if chosen is not None and chosen != "group" and self.norm_std is True:
            raise conflict(
                "adv.norm_std",
                f"adv.estimator={chosen} has no group standard deviation to divide by",
                "use adv.estimator=group, or adv.whiten=true",
            )
        if chosen is not None and chosen != "ema" and self.ema_beta != default("adv.ema_beta"):
            raise conflict(
                "adv.ema_beta",
                f"adv.estimator={chosen} has no moving average",
                "use adv.estimator=ema, or remove adv.ema_beta",
            )
        return self


class Critic(Node):
    """The critic of adv.values=critic, a model of the expected return that is trained next to the policy."""

    shared: bool = False
    """Use a value head on the policy's own trunk, trained with it, instead of a separate model."""
    coef: Above0 = 0.1
    """shared=true: weight of the value loss."""
    clip: Above0 | None = None
    """Clip range of the value loss: how far a value may move per rollout. null: no clipping."""
    lr: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Learning rate of the critic. null: optim.lr with shared=true; otherwise one default for models with a hidden size
    of at most 256 and another for larger models."""
    updates_per_rollout: Count | None = None
    """Critic updates per step, a multiple of the policy's. null: as many as the policy's."""
    warmup_steps: Whole = 0
    """Steps in which only the critic is trained."""

    @model_validator(mode="after")
    def _shared_critic_has_no_optimizer(self) -> Critic:
        for name in ("lr", "updates_per_rollout"):
            if self.shared and getattr(self, name) is not None:
                raise conflict(
                    f"critic.{name}",
                    "a shared critic is trained by the policy's updates",
                    f"remove critic.{name}, or set critic.shared=false",
                )
        if self.shared and self.warmup_steps > 0:
            raise conflict(
                "critic.warmup_steps",
                "a shared critic cannot be trained without training the policy",
                "remove critic.warmup_steps, or set critic.shared=false",
            )
        if not self.shared and self.coef != 0.1:
            raise conflict(
                "critic.coef",
                "a separate critic has its own optimizer, so its loss has no weight",
                "remove critic.coef, or set critic.shared=true",
            )
        return self


class Vine(Node):
    """The continuations that adv.values=continuations estimates values from (VinePPO)."""

    samples: Count = 9
    """Continuations from the start of each step of an answer."""
    split: str | None = None
    """A string that ends a step; an empty string makes every token a step. null: set by the task, or a line break for a
    data file."""
    max_steps: Count = 32
    """Maximum number of steps per answer. The rest of the answer counts as one more step."""


class Prime(Node):
    """The implicit process reward model of algo=prime, trained on outcomes."""

    model: Text | None = None
    """The initial process reward model: a run of novarl rm with loss=implicit_*, compared with the model that run
    started from. null: the reference, compared with itself."""
    beta: Above0 | None = None
    """Scale of the token reward beta * (log model - log reference). null: the value `prime.model` was trained with,
    otherwise 0.05."""
    lr: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Learning rate of the process reward model. 0: `prime.model` stays fixed; null: a tenth of the policy's learning
    rate."""
    threshold: float = 0.5
    """A reward of at least this value counts as a correct outcome."""

    @model_validator(mode="after")
    def _model_differs_from_reference(self) -> Prime:
        if self.lr == 0.0 and self.model is None:
            raise conflict(
                "prime.lr",
                "a fixed copy of the reference gives every token a reward of 0",
                "set prime.model to a trained model, or remove prime.lr",
            )
        return self


class Clip(Node):
    """Clipping of the probability ratio to [1 - low, 1 + high]."""

    low: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Lower clip range: ratios below 1 - low are clipped. null: set by the algorithm."""
    high: Above0 | None = None
    """Upper clip range: ratios above 1 + high are clipped. null: set by the algorithm, or `clip.low` if that is set."""
    dual: Annotated[float, Field(gt=1.0)] | None = None
    """loss.surrogate=dual_clip: upper bound of the ratio for negative advantages, at least 1 + high. A value turns
    ppo_clip into dual_clip. null: 3."""


class Correction(Node):
    """Off-policy correction with importance weights pi_old / mu."""

    type: axes.CorrectionName | None = None
    """token, sequence: weights, cut at tis_max; icepop, sequence_mask: 1 within [low, high], else 0; null: token where
    tis_max is given or the samples are old (rollout.staleness=1), otherwise no correction."""
    tis_max: Above0 | None = None
    """The largest weight; null: 2 where the type has weights."""
    low: Above0 = default("correction.low")
    """The smallest ratio that a mask lets pass."""
    high: Above0 = default("correction.high")
    """The largest ratio that a mask lets pass."""
    geometric: bool = default("correction.geometric")
    """sequence, sequence_mask: the length-th root of an answer's ratio, which is not exact and does not explode with
    length."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Correction:
        reads = CORRECTIONS[self.type].reads if self.type else {}
        masks, low, high = "correction.low" in reads, default("correction.low"), default("correction.high")
        if masks and self.tis_max is not None:
            raise conflict(
                "correction.tis_max",
                f"correction.type={self.type} masks tokens and has no weight to truncate",
                "use correction.low and correction.high, or correction.type=token",
            )
        if not masks and (self.low != low or self.high != high):
            raise conflict(
                "correction.low" if self.low != low else "correction.high",
                f"correction.type={self.type or 'null'} has no bounds",
                "use correction.tis_max, or correction.type=icepop",
            )
        if self.geometric and "correction.geometric" not in reads:
            raise conflict(
                "correction.geometric",
                f"correction.type={self.type or 'null'} does not use sequence-level weights",
                "use correction.type=sequence or sequence_mask, or remove it",
            )
        if self.low >= self.high:
            raise conflict("correction.low", "correction.low must be below correction.high", "lower it")
        return self


class KL(Node):
    """KL penalty: the distance to a reference policy."""

    type: axes.KLType | None = None
    """Where it enters; null: the algorithm's."""
    estimator: axes.KLEstimator | None = None
    """null: the algorithm's if its KL enters at the same place, otherwise k2 as a loss and k1 elsewhere."""
    coef: AtLeast0 | None = None
    """Weight of the penalty. 0: no penalty; null: set by the algorithm."""
    clamp: Above0 | None = None
    """k3: upper bound of a token's estimate (verl uses 10). null: no bound, unbiased."""
    corrected: bool = False
    """type=loss: multiply by pi / pi_old, which gives the gradient of KL(pi || pi_ref) for off-policy samples too."""
    unit: Literal["token", "sequence"] = "token"
    """Unit of KL targets and limits: nats per token or per answer."""
    reference: Text = "start"
    """The reference policy. start: the policy at the start of RL; ema: a moving average of the policy; tie: the policy
    itself (KL is 0, for monitoring only); otherwise a directory or hub id."""
    ema_decay: Beta = 0.99
    """reference=ema: decay of the moving average per step."""

    @model_validator(mode="after")
    def _penalty_has_an_effect(self) -> KL:
        if self.reference == "tie" and self.coef:
            raise conflict(
                "kl.reference",
                "KL to the policy itself is always 0, so a penalty has no effect",
                "use kl.reference=start or ema, or kl.coef=0",
            )
        if self.reference != "ema" and self.ema_decay != 0.99:
            raise conflict(
                "kl.ema_decay",
                f"kl.reference={self.reference} is not a moving average",
                "use kl.reference=ema, or remove kl.ema_decay",
            )
        if self.type == "loss" and self.estimator == "k1":
            raise conflict(
                "kl.estimator",
                "k1 in the loss has zero expected gradient, so it has no effect",
                "use kl.estimator=k2 or k3, or kl.type=reward",
            )
        return self


class Entropy(Node):
    """Bonus for the policy's entropy."""

    coef: AtLeast0 | None = None
    """Weight of the bonus; the initial weight if there is a target. null: set by the algorithm, or 0.01 if that is 0
    and there is a target."""
    target: Above0 | None = None
    """Adapt the weight to keep the entropy at this value, in nats per token. null: the weight is constant."""
    rate: Above0 = 0.05
    """Maximum change of the logarithm of the weight per step, if there is a target."""

    @model_validator(mode="after")
    def _can_adapt(self) -> Entropy:
        if self.target is not None and self.coef == 0:
            raise conflict(
                "entropy.coef",
                "a weight of 0 cannot adapt, because it is changed by multiplication",
                "set entropy.coef above 0, or remove entropy.coef or entropy.target",
            )
        if self.target is None and self.rate != 0.05:
            raise conflict(
                "entropy.rate",
                "the weight is constant without entropy.target",
                "set entropy.target, or remove entropy.rate",
            )
        return self


class Loss(Node):
    """The per-token loss and how the token losses are aggregated."""

    surrogate: axes.SurrogateName | OwnFunction | None = None
    """The per-token loss; file.py:name: a function of your own; null: the algorithm's."""

    agg: axes.AggregationName | None = None
    """token: mean over tokens; sequence: mean over answers of their mean; constant: sum over a fixed number;
    null: the algorithm's."""
    tau_pos: Above0 = default("loss.tau_pos")
    """surrogate=sapo: the temperature of the gate where the advantage is positive; larger closes it faster."""
    tau_neg: Above0 = default("loss.tau_neg")
    """surrogate=sapo: the temperature of the gate elsewhere."""
    mask_truncated: bool = False
    """Exclude truncated answers from the loss and its normalization. Their rewards still count in the baselines of
    other answers."""


class DynamicSampling(Node):
    """Replaces prompts whose answers all have the same reward, since they carry no learning signal."""

    enabled: bool | None = None
    """Replace groups with identical rewards. null: set by the algorithm."""
    max_refills: Count = 4
    """Maximum number of times to sample more prompts per step. After that the step continues with fewer."""
