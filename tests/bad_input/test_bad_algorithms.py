"""Parts of an algorithm that contradict each other, lack what they need, or would swing ever wider are refused before
anything is loaded or written: one line with what, where and how to mend it, and code 2, by `rl` as by `explain`."""

from __future__ import annotations

from pathlib import Path

import pytest

from novarl import cli
from tests.bad_input.test_bad_input import Case, assert_refused
from tests.compose.harness import ON_TASK

ADAPTIVE = "adaptive_kl=true"
BOUND = "constraint_optimization=true"
KL_BOUND = f"{BOUND} constraint_optimization.kl_constraint=0.1"
SEVERAL = "multi_objective=true"


def of(words: str, said: str) -> Case:
    return Case(f"rl ON_TASK {words}", said)


TWICE = {
    f"{estimator} with {key}": of(
        f"algo=ppo adv.estimator={estimator} {key}={value}",
        f"{key}: adv.estimator={estimator} already weights each token by pi_old / mu",
    )
    for estimator in ("vtrace", "clipped_is")
    for key, value in (("correction.type", "token"), ("correction.type", "icepop"), ("correction.tis_max", "2"))
}
CORRECTION = {
    "a mask has no weight to cut": of("correction.type=icepop correction.tis_max=2", "correction.tis_max: "),
    "bounds of what is not bounded": of("correction.low=0.1", "correction.low: correction.type=null has no bounds"),
    "the upper of them": of("correction.high=3", "correction.high: correction.type=null has no bounds"),
    "a root of what has no length": of(
        "correction.type=token correction.geometric=true", "correction.geometric: correction.type=token does not use"
    ),
    "no ratio between the bounds": of(
        "correction.type=icepop correction.low=2 correction.high=1", "correction.low must be below correction.high"
    ),
}
ALONE = {
    f"{algo} alone": of(
        f"algo={algo} responses_per_prompt=1 dynamic_sampling=false",
        f"responses_per_prompt: algo={algo} compares several answers to a prompt",
    )
    for algo in ("rloo", "grpo", "dr_grpo", "ppo_clip", "gspo", "cispo", "dapo", "reinforce_pp", "opo", "prime")
} | {
    f"{estimator} alone": of(
        f"algo=reinforce adv.estimator={estimator} responses_per_prompt=1",
        f"adv.estimator: {estimator} compares several answers to a prompt",
    )
    for estimator in ("group", "leave_one_out", "reinforce_pp", "opo", "prime")
}
CREDIT = {
    "values of which nobody asks": of("algo=grpo adv.values=critic", "adv.values: adv.estimator=group does not use"),
    "lambda without values": of("algo=rloo adv.lam=0.9", "adv.lam: adv.estimator=leave_one_out does not use it"),
    "lambda of whole returns": of("algo=ppo adv.estimator=monte_carlo adv.lam=0.9", "adv.lam: adv.estimator=monte_c"),
    "a constant of another baseline": of("algo=grpo adv.constant=1", "adv.constant: adv.estimator=group does not"),
    "steps of another estimator": of("algo=ppo adv.n=2", "adv.n: adv.estimator=gae does not use it"),
    "a level of another estimator": of("algo=ppo adv.is_level=trajectory", "adv.is_level: adv.estimator=gae does not"),
    "an entropy that cannot move": of("entropy.target=1 entropy.coef=0", "entropy.coef: a weight of 0 cannot adapt"),
    "a rate of what stands still": of("entropy.rate=0.1", "entropy.rate: the weight is constant without"),
    "two that move the entropy bonus": of(
        f"entropy.target=1 {BOUND} constraint_optimization.entropy_constraint=0.5",
        "entropy.target: a controller and a constraint would both change the weight of the entropy bonus",
    ),
    "an entropy that would swing": of("entropy.target=1 entropy.rate=50", "entropy.rate: with rate=50 the simulated"),
    "weights of another estimator": of("algo=ppo adv.rho_max=2", "adv.rho_max: adv.estimator=gae does not use it"),
    "memory of another baseline": of("algo=reinforce adv.estimator=mean adv.ema_beta=0.5", "has no moving average"),
    "values for steps where tokens need them": of(
        "algo=vineppo adv.estimator=td_lambda", "adv.values: continuations estimate values per step"
    ),
    "continuations of several turns": Case(
        "rl ON_TASK algo=vineppo rollout.max_turns=2 rollout.env_path=env.py reward=length",
        "adv.values: continuations do not support several turns",
        {"env.py": "def interact(messages): return []"},
    ),
    "what follows a limit, without a critic": of(
        "algo=vineppo adv.bootstrap_truncated=true", "adv.bootstrap_truncated: only a critic can"
    ),
    "a critic that nobody asks": of("algo=grpo critic.clip=0.2", "critic: algo=grpo does not use it"),
    "continuations that nobody asks": of("algo=ppo vine.samples=3", "vine: algo=ppo does not use it"),
    "process rewards that nobody asks": of("algo=ppo prime.beta=1", "prime: algo=ppo does not use it"),
    "a deviation without a group": of("algo=ppo adv.norm_std=true", "adv.norm_std: adv.estimator=gae has no group"),
    "nothing to clip": of("loss.surrogate=gpg clip.low=0.1", "clip: loss.surrogate=gpg has no ratio to clip"),
    "a clip of 0": of("clip.low=0", "clip.low: must be above 0"),
    "an unknown estimator": of("adv.estimator=gea", "adv.estimator: "),
    "an unknown surrogate": of("loss.surrogate=ppo_clipp", "loss.surrogate: "),
}
CRITIC = {
    "the policy never moves": of("algo=ppo critic.warmup_steps=1", "critic.warmup_steps: the policy would not"),
    "updates that do not divide": of(
        "algo=ppo critic.updates_per_rollout=5", "critic.updates_per_rollout: the critic's 5 updates are not a multiple"
    ),
    "one trunk, two rates": of("algo=ppo critic.shared=true critic.lr=1e-3", "critic.lr: a shared critic"),
    "one trunk, two counts": of(
        "algo=ppo critic.shared=true critic.updates_per_rollout=8", "critic.updates_per_rollout: a shared critic"
    ),
    "one trunk that waits": of(
        "algo=ppo critic.shared=true critic.warmup_steps=1", "critic.warmup_steps: a shared critic cannot"
    ),
    "a weight beside nothing": of("algo=ppo critic.coef=0.5", "critic.coef: a separate critic has its own optimizer"),
}
KL = {
    "no place": of("algo=rloo kl.coef=0.1", "kl.type: kl.coef=0.1 needs kl.type"),
    "no weight": of("algo=rloo kl.type=loss", "kl.coef: kl.type=loss with coefficient 0 has no effect"),
    "nothing to estimate": of("algo=rloo kl.estimator=k3", "kl.estimator: algo=rloo has no KL term"),
    "k1 as a loss": of("kl.type=loss kl.coef=0.1 kl.estimator=k1", "kl.estimator: k1 in the loss has zero"),
    "k1 as the algorithm's loss": of("algo=grpo kl.estimator=k1", "kl.estimator: k1 in the loss has zero"),
    "a clamp of k2": of("algo=reinforce_pp kl.clamp=10", "only k3 can be clamped, but there is kl.estimator=k2"),
    "a clamp of nothing": of("algo=dr_grpo kl.clamp=10", "only k3 can be clamped, but there is no KL term"),
    "corrected as a reward": of("algo=ppo kl.corrected=true", "kl.corrected: only KL in the loss can be corrected"),
    "tied": of("algo=rloo kl.type=loss kl.coef=0.1 kl.reference=tie", "kl.reference: KL to the policy itself is"),
    "tied, by the algorithm": of("algo=grpo kl.reference=tie", "KL to the policy itself is always 0: the penalty"),
    "tied, with a bound": of(f"{KL_BOUND} kl.reference=tie", "the constraint has no effect"),
    "tied, as an objective": of(
        f"{SEVERAL} multi_objective.objectives=[kl] kl.reference=tie", "objective has no effect"
    ),
    "a decay of what does not move": of("algo=grpo kl.ema_decay=0.5", "kl.reference=start is not a moving average"),
    "an update's KL per answer": of(
        f"{KL_BOUND} constraint_optimization.mode=rollback kl.unit=sequence",
        "kl.unit: mode=rollback constrains KL per",
    ),
}
CONTROLLERS = {
    "no KL to control": of(f"algo=rloo {ADAPTIVE}", "adaptive_kl.enabled: algo=rloo has no KL term"),
    "nothing to begin with": of(f"algo=grpo {ADAPTIVE} kl.coef=0", "adaptive_kl.initial_coef: a coefficient of 0"),
    "two hands on one price": of(f"algo=grpo {ADAPTIVE} {KL_BOUND}", "would both change the KL coefficient"),
    "a gain of another controller": of(
        f"algo=grpo {ADAPTIVE} adaptive_kl.kp=1", "adaptive_kl.kp: the controller dead_band has no setting 'kp'"
    ),
    "a band of no width": of(f"algo=grpo {ADAPTIVE} adaptive_kl.band=1", "adaptive_kl.band: band=1 must be above 1"),
    "bounds crossed": of(
        f"algo=grpo {ADAPTIVE} adaptive_kl.min_coef=1 adaptive_kl.max_coef=0.5", "adaptive_kl.min_coef: invalid range"
    ),
    "a start out of bounds": of(
        f"algo=grpo {ADAPTIVE} adaptive_kl.min_coef=1", "adaptive_kl.initial_coef: starts at 0.04, outside [1, 100]"
    ),
    "an unknown controller": of(f"algo=grpo {ADAPTIVE} adaptive_kl.controller_type=pidd", "did you mean pid?"),
}
WILD = {
    "dead_band": "speed=10",
    "exponential": "rate=5",
    "pid": "ki=20",
    "two_speed": "up=30",
}
DIVERGING = {
    f"a {kind} that swings": of(
        f"algo=grpo {ADAPTIVE} adaptive_kl.controller_type={kind} adaptive_kl.{gains}",
        "the simulated loop deviates from its target by more than a factor of 4",
    )
    for kind, gains in WILD.items()
}
CONSTRAINTS = {
    "nothing is bound": of(BOUND, "constraint_optimization: no constraint is set"),
    "two floors": of(
        f"{BOUND} constraint_optimization.entropy_constraint=0.1 constraint_optimization.entropy_fraction=0.5",
        "constraint_optimization.entropy_fraction: the entropy has two lower bounds",
    ),
    "a hard mode without a bound": of(
        f"{BOUND} constraint_optimization.mode=rollback constraint_optimization.entropy_constraint=1",
        "constraint_optimization.kl_constraint: mode=rollback needs a KL limit",
    ),
    "a hard mode on entropy": of(
        f"{KL_BOUND} constraint_optimization.mode=early_stop constraint_optimization.entropy_constraint=1",
        "constraint_optimization.mode: mode=early_stop constrains KL only",
    ),
    "gains of the other dual": of(
        f"{KL_BOUND} constraint_optimization.dual=softplus constraint_optimization.lagrangian_kp=1",
        "constraint_optimization.dual: kp and kd require the projected dual",
    ),
    "a start above all bounds": of(
        f"{KL_BOUND} constraint_optimization.lagrangian_init=1000", "constraint_optimization.lagrangian_init: init=1000"
    ),
}
OBJECTIVES = {
    "no objective": of(SEVERAL, "multi_objective.objectives: no objectives are set"),
    "no direction": of(
        f"{SEVERAL} multi_objective.objectives.length.weight=1", "objectives.length: the objective has no direction"
    ),
    "no direction, in a list": of(
        f"{SEVERAL} multi_objective.objectives=[reward,length]", "the direction of objective 'length' is unknown"
    ),
    "no such direction": of(f"{SEVERAL} multi_objective.objectives.length.direction=less", "must be 'max' or 'min'"),
    "no such objective": of(
        f"{SEVERAL} multi_objective.objectives.lenght.direction=min",
        "multi_objective.objectives.lenght: this run has no reward or measurement of that name (did you mean length?)",
    ),
    "a reward of another task": of(f"{SEVERAL} multi_objective.objectives.right.direction=max", "has no reward or"),
    "a weight that says which way": of(
        f"{SEVERAL} multi_objective.objectives.length.direction=max multi_objective.objectives.length.weight=-1",
        "multi_objective.objectives.length.weight: must be at least 0.0, got -1",
    ),
    "only watched": of(
        f"{SEVERAL} multi_objective.objectives.length.direction=max multi_objective.objectives.length.weight=0",
        "multi_objective.objectives: no objective has a weight above 0",
    ),
}
CASES = {
    **{**TWICE, **CORRECTION, **ALONE, **CREDIT, **CRITIC},
    **{**KL, **CONTROLLERS, **DIVERGING, **CONSTRAINTS, **OBJECTIVES},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bad_algorithm(
    case: Case, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_refused(case, tmp_path, capfd, monkeypatch)
    words = case.command.split()[2:]
    assert cli.main(["explain", *ON_TASK, *words]) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1) and case.said in err


def test_nothing_is_loaded_before_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from novarl.run import lifecycle

    monkeypatch.setattr(lifecycle, "start", lambda *_: pytest.fail("the machine was started"))
    gains = ["adaptive_kl=true", "adaptive_kl.controller_type=pid", "adaptive_kl.ki=20"]
    assert cli.main(["rl", *ON_TASK, "algo=grpo", *gains]) == 2


RIGHT = (
    *(
        "algo=ppo adv.estimator=vtrace",
        "algo=ppo adv.estimator=retrace correction.type=token",
        "algo=ppo adv.values=null",
    ),
    *("algo=grpo adv.estimator=gae", "algo=reinforce adv.estimator=monte_carlo responses_per_prompt=1"),
    *("algo=rloo kl.type=loss adaptive_kl=true adaptive_kl.initial_coef=0.1", f"algo=rloo kl.type=reward {KL_BOUND}"),
    *(f"algo=rloo kl.estimator=k3 {KL_BOUND}", "kl.reference=tie", f"{SEVERAL} multi_objective.objectives=[reward,kl]"),
    f"algo=grpo {ADAPTIVE} adaptive_kl.controller_type=schedule kl.coef=0.1",
)


@pytest.mark.parametrize("words", RIGHT)
def test_what_is_right_is_not_refused(words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", *ON_TASK, *words.split()]) == 0, capfd.readouterr().err
