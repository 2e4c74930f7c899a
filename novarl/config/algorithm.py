"""The sections that change parts of an algorithm: advantages, surrogate, correction, regularizers, aggregation.

`null` means that the algorithm sets the value.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from novarl.config.parts import Above0, AtLeast0, Beta, Count, Node, OwnFunction, Share, Text, Whole, refuse
from novarl.core.axes import AggregationName, Estimator, KLEstimator, KLType, SurrogateName, ValueSource


class Advantage(Node):
    """Advantage estimation: the baseline that an answer's reward is compared with."""

    estimator: Estimator | OwnFunction | None = None
    """The advantage estimator. group, leave_one_out, opo and reinforce_pp compare with the other answers to the prompt;
    mean with the batch mean; ema with a moving average of past rewards; scst with the greedy answer; constant with a
    number. gae, vtrace, retrace, td_lambda, n_step, clipped_is and monte_carlo use values of intermediate states; prime
    uses token-level rewards; file.py:name is a custom function. null: set by the algorithm."""
    norm_std: bool | None = None
    """Divide by the standard deviation of the prompt's rewards. null: set by the algorithm."""
    ema_beta: Beta = 0.9
    """estimator=ema: decay of the moving average."""
    constant: float = 0.0
    """estimator=constant: the baseline, subtracted from every reward."""
    values: ValueSource | None = None
    """Where state values come from: a trained critic, or fresh continuations from the steps of an answer. null: set by
    the algorithm."""
    gamma: Share | None = None
    """Discount factor per step. Used by estimators with state values. null: set by the algorithm."""
    lam: Share | None = None
    """Lambda of gae, vtrace, retrace and td_lambda: 0 relies on the values, 1 on the rewards. null: set by the
    algorithm."""
    n: Count = 5
    """estimator=n_step: number of rewards before the value is used."""
    rho_max: Above0 = 1.0
    """vtrace, clipped_is: upper bound of a step's importance weight pi_old / mu."""
    c_max: Above0 = 1.0
    """vtrace, retrace: upper bound of the importance weights of later steps."""
    is_level: Literal["decision", "trajectory"] = "decision"
    """estimator=clipped_is: one importance weight per step, or one for the whole answer (the product of its ratios)."""
    bootstrap_truncated: bool = False
    """Use the critic's value at the end of a truncated answer. false: the limit counts as part of the task and the
    reward judges the answer as it is."""
    whiten: bool | None = None
    """Normalize the advantages of all trained tokens to mean 0 and variance 1. null: set by the algorithm."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Advantage:
        chosen = self.estimator
        refuse(
            chosen is not None and chosen != "group" and self.norm_std is True,
            "adv.norm_std",
            f"adv.estimator={chosen} has no group standard deviation to divide by",
            "use adv.estimator=group, or adv.whiten=true",
        )
        refuse(
            chosen is not None and chosen != "ema" and self.ema_beta != 0.9,
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
            refuse(
                self.shared and getattr(self, name) is not None,
                f"critic.{name}",
                "a shared critic is trained by the policy's updates",
                f"remove critic.{name}, or set critic.shared=false",
            )
        refuse(
            self.shared and self.warmup_steps > 0,
            "critic.warmup_steps",
            "a shared critic cannot be trained without training the policy",
            "remove critic.warmup_steps, or set critic.shared=false",
        )
        refuse(
            not self.shared and self.coef != 0.1,
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
        refuse(
            self.lr == 0.0 and self.model is None,
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

    type: Literal["token", "sequence", "icepop", "sequence_mask"] | None = None
    """Type of the correction. token, sequence: weights truncated at tis_max; icepop, sequence_mask: weight 1 within
    [low, high], otherwise 0. null: token if tis_max is set or rollout.staleness=1, otherwise no correction."""
    tis_max: Above0 | None = None
    """Upper bound of the importance weight. null: 2 for types with weights."""
    low: Above0 = 0.5
    """Lower bound of the ratio for masks."""
    high: Above0 = 5.0
    """Upper bound of the ratio for masks."""
    geometric: bool = False
    """sequence, sequence_mask: use the geometric mean of the token ratios. It is biased, but does not grow with the
    length of the answer."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Correction:
        masks = self.type in ("icepop", "sequence_mask")
        refuse(
            masks and self.tis_max is not None,
            "correction.tis_max",
            f"correction.type={self.type} masks tokens and has no weight to truncate",
            "use correction.low and correction.high, or correction.type=token",
        )
        refuse(
            not masks and (self.low != 0.5 or self.high != 5.0),
            "correction.low" if self.low != 0.5 else "correction.high",
            f"correction.type={self.type or 'null'} has no bounds",
            "use correction.tis_max, or correction.type=icepop",
        )
        refuse(
            self.geometric and self.type not in ("sequence", "sequence_mask"),
            "correction.geometric",
            f"correction.type={self.type or 'null'} does not use sequence-level weights",
            "use correction.type=sequence or sequence_mask, or remove it",
        )
        refuse(self.low >= self.high, "correction.low", "correction.low must be below correction.high", "lower it")
        return self


class KL(Node):
    """KL penalty: the distance to a reference policy."""

    type: KLType | None = None
    """Where the penalty is applied: in the loss, the reward or the advantage. null: set by the algorithm."""
    estimator: KLEstimator | None = None
    """KL estimator. null: the algorithm's if its KL is applied at the same place, otherwise k2 in the loss and k1
    elsewhere."""
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
    def _reference_differs_from_policy(self) -> KL:
        refuse(
            self.reference == "tie" and bool(self.coef),
            "kl.reference",
            "KL to the policy itself is always 0, so a penalty has no effect",
            "use kl.reference=start or ema, or kl.coef=0",
        )
        refuse(
            self.reference != "ema" and self.ema_decay != 0.99,
            "kl.ema_decay",
            f"kl.reference={self.reference} is not a moving average",
            "use kl.reference=ema, or remove kl.ema_decay",
        )
        return self

    @model_validator(mode="after")
    def _has_a_gradient(self) -> KL:
        refuse(
            self.type == "loss" and self.estimator == "k1",
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
        refuse(
            self.target is not None and self.coef == 0,
            "entropy.coef",
            "a weight of 0 cannot adapt, because it is changed by multiplication",
            "set entropy.coef above 0, or remove entropy.coef or entropy.target",
        )
        refuse(
            self.target is None and self.rate != 0.05,
            "entropy.rate",
            "the weight is constant without entropy.target",
            "set entropy.target, or remove entropy.rate",
        )
        return self


class Loss(Node):
    """The per-token loss and how the token losses are aggregated."""

    surrogate: SurrogateName | OwnFunction | None = None
    """The policy-gradient objective per token. file.py:name is a custom function; null: set by the algorithm."""

    agg: AggregationName | None = None
    """Aggregation of token losses. token: mean over tokens; sequence: mean over answers of their mean; constant: sum
    divided by a constant; null: set by the algorithm."""
    tau_pos: Above0 = 1.0
    """surrogate=sapo: temperature of the gate for positive advantages. A larger value closes the gate faster."""
    tau_neg: Above0 = 1.05
    """surrogate=sapo: temperature of the gate for other advantages."""
    mask_truncated: bool = False
    """Exclude truncated answers from the loss and its normalization. Their rewards still count in the baselines of
    other answers."""


class DynamicSampling(Node):
    """Replaces prompts whose answers all have the same reward, since they carry no learning signal."""

    enabled: bool | None = None
    """Replace groups with identical rewards. null: set by the algorithm."""
    max_refills: Count = 4
    """Maximum number of times to sample more prompts per step. After that the step continues with fewer."""
