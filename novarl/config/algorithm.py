"""The sections that change an algorithm's row: credit, surrogate, correction, regularizers, aggregation.

`null` means what the row says.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from novarl.algos import axes
from novarl.algos.axes import CORRECTIONS, default
from novarl.config.parts import Above0, AtLeast0, Beta, Count, Node, OwnFunction, Share, Text, Whole, refuse


class Advantage(Node):
    """Credit: what an answer's reward is compared with."""

    estimator: axes.EstimatorName | OwnFunction | None = None
    """group, leave_one_out, opo, reinforce_pp: the other answers to the prompt; mean: the batch; ema: the past; scst:
    the greedy answer; constant: a number; gae, vtrace, retrace, td_lambda, n_step, clipped_is, monte_carlo: values of
    the states on the way; prime: rewards of tokens; file.py:name: a function of your own; null: the algorithm's."""
    norm_std: bool | None = None
    """Divide by the standard deviation of the prompt's rewards; null: the algorithm's."""
    ema_beta: Beta = default("adv.ema_beta")
    """With estimator=ema: the weight of the past."""
    constant: float = default("adv.constant")
    """With estimator=constant: what is subtracted from every reward."""
    values: axes.ValueSource | None = None
    """Who supplies the values of states: a learnt critic, or fresh continuations from the steps of an answer; null: the
    algorithm's."""
    gamma: Share | None = None
    """Estimators over time: the discount of a step; null: the algorithm's."""
    lam: Share | None = None
    """gae, vtrace, retrace, td_lambda: 0 trusts the values, 1 the rewards; null: the algorithm's."""
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
    """An answer cut off by a limit is worth its value there; false: the limit is part of the task, and the reward has
    judged the answer as it stands."""
    whiten: bool | None = None
    """Shift and scale the advantages of all trained tokens to mean 0 and variance 1; null: the algorithm's."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Advantage:
        chosen = self.estimator
        refuse(
            chosen is not None and chosen != "group" and self.norm_std is True,
            "adv.norm_std",
            f"adv.estimator={chosen} has no group whose deviation to divide by",
            "use adv.estimator=group, or adv.whiten=true",
        )
        refuse(
            chosen is not None and chosen != "ema" and self.ema_beta != default("adv.ema_beta"),
            "adv.ema_beta",
            f"adv.estimator={chosen} keeps no moving average",
            "use adv.estimator=ema, or leave adv.ema_beta out",
        )
        return self


class Critic(Node):
    """The model of the reward still to come that adv.values=critic learns beside the policy."""

    shared: bool = False
    """A head on the policy's own trunk, trained with it, instead of a model of its own."""
    coef: Above0 = 0.1
    """With shared=true: the weight of the value loss beside the policy's."""
    clip: Above0 | None = None
    """How far a value may move in one rollout before its loss stops pulling; null: no clip."""
    lr: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Its own learning rate; null: optim.lr for shared=true, otherwise one for models up to 256 wide, as the
    built-in ones are, and one for others."""
    updates_per_rollout: Count | None = None
    """Its updates in a step, a multiple of the policy's; null: as many."""
    warmup_steps: Whole = 0
    """Steps in which the critic learns and the policy stands still."""

    @model_validator(mode="after")
    def _one_trunk_one_optimiser(self) -> Critic:
        for name in ("lr", "updates_per_rollout"):
            refuse(
                self.shared and getattr(self, name) is not None,
                f"critic.{name}",
                "a critic on the policy's trunk is trained by the policy's updates",
                f"leave critic.{name} out, or critic.shared=false",
            )
        refuse(
            self.shared and self.warmup_steps > 0,
            "critic.warmup_steps",
            "a critic on the policy's trunk cannot learn while the policy stands still",
            "leave critic.warmup_steps out, or critic.shared=false",
        )
        refuse(
            not self.shared and self.coef != 0.1,
            "critic.coef",
            "a critic of its own has an optimiser of its own, and nothing to be weighed against",
            "leave critic.coef out, or critic.shared=true",
        )
        return self


class Vine(Node):
    """The continuations that adv.values=continuations estimates values with."""

    samples: Count = 9
    """Continuations from each step's beginning."""
    split: str | None = None
    """A string after which a step ends, every token's end where it is empty; null: the task's, a line break for a data
    file."""
    max_steps: Count = 32
    """The most steps of an answer; what follows the last is one step."""


class Prime(Node):
    """The implicit reward model of algo=prime, learnt from outcomes."""

    model: Text | None = None
    """What it starts as: a run of novarl rm loss=implicit_*, compared with the model that run started from; null: the
    reference, compared with itself."""
    beta: Above0 | None = None
    """Reward of a token = beta * (log model - log reference); null: what `prime.model` was trained with, else 0.05."""
    lr: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Its learning rate; 0: `prime.model` stays as it is; null: a tenth of the policy's."""
    threshold: float = 0.5
    """A reward at least this high counts as a right outcome."""

    @model_validator(mode="after")
    def _has_something_to_say(self) -> Prime:
        refuse(
            self.lr == 0.0 and self.model is None,
            "prime.lr",
            "a model that starts as its reference and does not learn gives no token a reward",
            "name a trained one in prime.model, or leave prime.lr out",
        )
        return self


class Clip(Node):
    """How far an update may move the policy: the ratio stays within [1 - low, 1 + high]."""

    low: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """null: the algorithm's."""
    high: Above0 | None = None
    """null: the algorithm's."""
    dual: Annotated[float, Field(gt=1.0)] | None = None
    """loss.surrogate=dual_clip: the largest ratio that counts where the advantage is negative, at least 1 + high; null:
    3. A number turns ppo_clip into dual_clip."""


class Correction(Node):
    """Off-policy correction by importance weights pi_old / mu."""

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
        refuse(
            masks and self.tis_max is not None,
            "correction.tis_max",
            f"correction.type={self.type} lets tokens pass or not, and has no weight to cut",
            "use correction.low and correction.high, or correction.type=token",
        )
        refuse(
            not masks and (self.low != low or self.high != high),
            "correction.low" if self.low != low else "correction.high",
            f"correction.type={self.type or 'null'} has no bounds",
            "use correction.tis_max, or correction.type=icepop",
        )
        refuse(
            self.geometric and "correction.geometric" not in reads,
            "correction.geometric",
            f"correction.type={self.type or 'null'} does not weigh answers as a whole",
            "use correction.type=sequence or sequence_mask, or leave it out",
        )
        refuse(
            self.low >= self.high, "correction.low", "no ratio lies between the bounds", "make low smaller than high"
        )
        return self


class KL(Node):
    """A penalty on the distance from the starting policy."""

    type: axes.KLType | None = None
    """Where it enters; null: the algorithm's."""
    estimator: axes.KLEstimator | None = None
    """null: the algorithm's if its KL enters at the same place, otherwise k2 as a loss and k1 elsewhere."""
    coef: AtLeast0 | None = None
    """Its weight, 0 for none; null: the algorithm's."""
    clamp: Above0 | None = None
    """k3: the largest value that a token's estimate may have (verl: 10); null: no limit, and no bias."""
    corrected: bool = False
    """As a loss, multiply by pi / pi_old: the gradient of KL(pi || pi_ref) also where the samples are old."""
    unit: Literal["token", "sequence"] = "token"
    """What targets and limits of KL are counted in: nats per token, or per answer."""
    reference: Text = "start"
    """The policy KL is measured to: start (as it was when reinforcement began), ema (a moving average of the policy), a
    directory or hub id, or tie (the policy itself: KL is 0, for monitoring only)."""
    ema_decay: Beta = 0.99
    """With reference=ema: the weight of the past at each step."""

    @model_validator(mode="after")
    def _reference_can_pull(self) -> KL:
        refuse(
            self.reference == "tie" and bool(self.coef),
            "kl.reference",
            "the policy tied to itself has KL 0, and a penalty on it would do nothing",
            "use kl.reference=start or ema, or kl.coef=0",
        )
        refuse(
            self.reference != "ema" and self.ema_decay != 0.99,
            "kl.ema_decay",
            f"kl.reference={self.reference} does not move",
            "use kl.reference=ema, or leave kl.ema_decay out",
        )
        return self

    @model_validator(mode="after")
    def _has_a_gradient(self) -> KL:
        refuse(
            self.type == "loss" and self.estimator == "k1",
            "kl.estimator",
            "k1 as a loss has zero gradient on average: it would cost nothing and do nothing",
            "use kl.estimator=k2 or k3, or kl.type=reward",
        )
        return self


class Entropy(Node):
    """A bonus on the policy's entropy."""

    coef: AtLeast0 | None = None
    """Its weight, with a target the one to begin with; null: the algorithm's, or 0.01 if that is 0 and there is a
    target."""
    target: Above0 | None = None
    """Move the weight so that the entropy is this, in nats per token; null: the weight stays as it is."""
    rate: Above0 = 0.05
    """With a target: the most that a step changes the weight's logarithm."""

    @model_validator(mode="after")
    def _can_move(self) -> Entropy:
        refuse(
            self.target is not None and self.coef == 0,
            "entropy.coef",
            "a weight that starts at 0 stays at 0, since it is adapted by factors",
            "start above 0, or leave entropy.coef or entropy.target out",
        )
        refuse(
            self.target is None and self.rate != 0.05,
            "entropy.rate",
            "without a target the weight does not move",
            "set entropy.target, or leave entropy.rate out",
        )
        return self


class Loss(Node):
    """What is minimised for each token, and how the losses of tokens become one number."""

    surrogate: axes.SurrogateName | OwnFunction | None = None
    """What of a token's log-probability and advantage is minimised; file.py:name: a function of your own; null: the
    algorithm's."""

    agg: axes.AggregationName | None = None
    """token: mean over tokens; sequence: mean over answers of their mean; constant: sum over a fixed number;
    null: the algorithm's."""
    tau_pos: Above0 = default("loss.tau_pos")
    """surrogate=sapo: the temperature of the gate where the advantage is positive; larger closes it faster."""
    tau_neg: Above0 = default("loss.tau_neg")
    """surrogate=sapo: the temperature of the gate elsewhere."""
    mask_truncated: bool = False
    """Leave answers that a limit cut off out of the loss, and out of the means that it is made of. Their rewards still
    count in the baselines and deviations of the other answers' advantages."""


class DynamicSampling(Node):
    """Prompts whose answers all score the same teach nothing: ask others in their place."""

    enabled: bool | None = None
    """null: the algorithm's."""
    max_refills: Count = 4
    """How often to ask for more prompts before going on with fewer."""
