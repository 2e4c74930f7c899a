"""Controllers of a coefficient: golden steps, what they may never do, and the loops they make with a simulated run."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, strategies as st

from novarl.control.controller import Adaptive, Controller
from novarl.control.controllers import SHAPES, EntropyTarget, Exponential, Shape, make
from novarl.control.stability import Plant, check_stability, simulate
from novarl.core.errors import NovaError

TARGET = 0.01
ADAPTIVE = ("dead_band", "ziegler", "exponential", "two_speed", "linear", "pid")
SYMMETRIC = tuple(kind for kind in ADAPTIVE if kind != "two_speed")
EPISODES = 1000
"""Of a step: a tenth of ziegler's horizon."""
KLS = st.floats(-1.0, 10.0)


def entropy_target(coef: float = 0.05) -> EntropyTarget:
    return EntropyTarget(coef=coef, target=1.2)


MAKERS: dict[str, Callable[[], Controller]] = {
    **{kind: lambda kind=kind: make(kind, coef=0.2, target=TARGET) for kind in ("fixed", *ADAPTIVE)},
    "schedule": lambda: make("schedule", coef=0.2, total_steps=20),
    "entropy": entropy_target,
}


@pytest.fixture(params=MAKERS)
def controller(request: pytest.FixtureRequest) -> Controller:
    return MAKERS[request.param]()


@pytest.mark.parametrize(
    ("kind", "settings", "over_target", "factor"),
    [
        ("fixed", {}, 9.0, 1.0),
        ("dead_band", {}, 1.51, 1.05),
        ("dead_band", {}, 1.49, 1.0),
        ("dead_band", {}, 0.67, 1.0),
        ("dead_band", {}, 0.66, 1 / 1.05),
        ("dead_band", {"band": 1.2, "speed": 2.0}, 1.3, 2.0),
        ("ziegler", {}, 3.0, 1 + 0.2 * 500 / 10_000),
        ("ziegler", {}, 1.1, 1 + 0.1 * 500 / 10_000),
        ("ziegler", {}, 0.0, 1 - 0.2 * 500 / 10_000),
        ("ziegler", {"horizon": 100}, 3.0, 1.2),
        ("exponential", {}, 2.0, 2**0.05),
        ("exponential", {}, 0.5, 0.5**0.05),
        ("exponential", {}, 100.0, math.exp(0.05)),
        ("exponential", {}, 0.0, math.exp(-0.05)),
        ("two_speed", {}, 1.001, 1.03),
        ("two_speed", {}, 1.0, 0.99),
        ("linear", {}, 1.1, 1.025),
        ("linear", {}, 100.0, 1.05),
        ("linear", {}, 0.0, 0.95),
        ("linear", {"factor": 0.2, "max_step": 1.0}, 1.5, 1.1),
        ("pid", {}, 1.5, math.exp(0.25 * 0.5)),
        ("pid", {}, 50.0, math.exp(0.25)),
    ],
)
def test_golden_first_step(kind: str, settings: dict[str, Any], over_target: float, factor: float) -> None:
    made = make(kind, coef=0.2, target=TARGET, **settings)
    assert made.update(over_target * TARGET, 500) == pytest.approx(0.2 * factor)
    assert made.coef == pytest.approx(0.2 * factor)


def test_golden_pid() -> None:
    """Ratios 1.5, 2, 1: errors .5, 1, 0; averages 1.5, 1.65, 1.455; integrals .025, .075, .075."""
    pid = make("pid", coef=0.2, target=TARGET)
    got = [math.log(pid.update(ratio * TARGET) / 0.2) for ratio in (1.5, 2.0, 1.0)]
    assert got == pytest.approx([0.1 + 0.025, 0.2 + 0.075 + 0.1 * 0.15, 0.075 - 0.1 * 0.195])


def test_golden_entropy() -> None:
    """1.2 wanted: 0.6 is half too low, 1.8 half too high, 12 as much as counts."""
    assert entropy_target().update(0.6) == pytest.approx(0.05 * math.exp(0.025))
    assert entropy_target().update(1.8) == pytest.approx(0.05 * math.exp(-0.025))
    assert entropy_target().update(12.0) == pytest.approx(0.05 * math.exp(-0.05))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("constant", (0.2, 0.2, 0.2, 0.2)),
        ("linear", (0.2, 0.155, 0.11, 0.02)),
        ("cosine", (0.2, 0.02 + 0.09 * (1 + math.sqrt(0.5)), 0.11, 0.02)),
        ("exponential", (0.2, None, 0.02 + 0.18 * (math.exp(-1.5) - math.exp(-3)) / (1 - math.exp(-3)), 0.02)),
        ("warmup_cosine", (0.0, 0.2, 0.02 + 0.18 * 0.75, 0.02)),
    ],
)
def test_golden_schedules(shape: Shape, expected: tuple[float | None, ...]) -> None:
    """At steps 0, 5, 10 and 20 of 20, from 0.2 to 0.02; the warm-up takes a quarter."""
    made = make("schedule", coef=0.2, total_steps=20, shape=shape, final_coef=0.02, warmup_frac=0.25)
    seen = [made.coef, *[made.update(0.0, 64) for _ in range(25)]]
    for step, value in zip((0, 5, 10, 20), expected, strict=True):
        assert value is None or seen[step] == pytest.approx(value)
    assert seen[20:] == pytest.approx([seen[20]] * 6), "it stays where it ends"


def test_the_plain_exponential_decay_is_a_schedule() -> None:
    made = make("schedule", coef=0.2, total_steps=10, shape="exponential", final_coef=0.2 * math.exp(-3))
    assert [made.update(0.0) for _ in range(10)] == pytest.approx([0.2 * math.exp(-0.3 * t) for t in range(1, 11)])


def test_a_schedule_is_smooth_where_the_warm_up_ends() -> None:
    made = make("schedule", coef=1.0, total_steps=1000, shape="warmup_cosine")
    seen = [made.coef, *[made.update(0.0) for _ in range(1000)]]
    assert max(seen) == pytest.approx(1.0) and seen.index(max(seen)) == 100
    assert max(abs(a - b) for a, b in pairwise(seen)) <= 0.01 + 1e-12


def test_state_survives_json_bit_by_bit(controller: Controller) -> None:
    """Resumed in the middle, it goes on exactly; from scratch, it would not."""
    draw = random.Random(1)
    for _ in range(7):
        controller.update(TARGET * draw.lognormvariate(0.8, 0.5), 300)
    state = json.loads(json.dumps(controller.state_dict()))
    resumed = controller.started_at(controller.initial)
    fresh = resumed.state_dict()
    resumed.load_state_dict(state)
    rest = [draw.lognormvariate(0.0, 1.0) * TARGET for _ in range(50)]
    assert [resumed.update(kl, 300) for kl in rest] == [controller.update(kl, 300) for kl in rest]
    assert resumed.state_dict() == controller.state_dict()
    assert (fresh == state) == (controller.memory == ("coef",) and state["coef"] == controller.initial)


def test_reset_forgets_everything(controller: Controller) -> None:
    start = controller.state_dict()
    for _ in range(9):
        controller.update(5 * TARGET, 300)
    controller.reset()
    assert controller.state_dict() == start


def test_another_controllers_state_is_refused() -> None:
    with pytest.raises(NovaError, match="integral"):
        make("pid", coef=0.2).load_state_dict(make("linear", coef=0.2).state_dict())


@pytest.mark.parametrize("kind", ADAPTIVE)
@given(st.lists(KLS, max_size=5), KLS, KLS)
def test_more_kl_never_means_less_coefficient(kind: str, past: list[float], one: float, other: float) -> None:
    low, high = sorted((one, other))
    ends = []
    for last in (low, high):
        made = make(kind, coef=0.2, target=TARGET, min_coef=0.1, max_coef=0.4)
        for kl in past:
            made.update(kl, EPISODES)
        ends.append(made.update(last, EPISODES))
    assert ends[0] <= ends[1]


@pytest.mark.parametrize("kind", ADAPTIVE)
def test_far_more_kl_means_more_coefficient(kind: str) -> None:
    up, down = (make(kind, coef=0.2, target=TARGET).update(kl, EPISODES) for kl in (3 * TARGET, TARGET / 3))
    assert up > 0.2 > down


def test_more_entropy_means_less_bonus() -> None:
    ends = [entropy_target().update(entropy) for entropy in (-0.1, 0.0, 0.5, 1.2, 1.3, 2.0, 2.4)]
    assert ends == sorted(ends, reverse=True) and ends[3] == 0.05 and len(set(ends)) == 6  # -0.1 is as bad as 0


def test_five_thousand_random_measurements_never_leave_the_bounds(controller: Controller) -> None:
    draw = random.Random(2)
    made = controller.started_at(0.2)
    made.min_coef, made.max_coef = 0.03, 3.0
    for _ in range(5000):
        kl = draw.choice((-1.0, 1.0)) * 10 ** draw.uniform(-12, 300)
        assert 0.03 <= made.update(kl, draw.randrange(0, 10**6)) <= 3.0


def test_nan_changes_nothing_and_infinities_are_far_off() -> None:
    for kind in ADAPTIVE:
        made = make(kind, coef=0.2, target=TARGET)
        made.update(2 * TARGET, EPISODES)
        before = made.state_dict()
        assert made.update(math.nan, EPISODES) == before["coef"] and made.state_dict() == before
        ends = []
        for kl in (-math.inf, -1.0, 0.0, math.inf, 1e6):
            made.load_state_dict(before)
            ends.append(made.update(kl, EPISODES))
            assert all(math.isfinite(value) for value in made.state_dict().values())
        assert ends[0] == ends[1] == ends[2] < ends[3] == ends[4]


def test_the_plant_is_the_regularised_optimum() -> None:
    """KL(ref e^(R / beta) / Z || ref) -> Var(R) / (2 beta^2): slope 2 near the reference, and less further out."""
    ref, reward = (0.4, 0.3, 0.2, 0.1), (0.0, 0.3, 0.5, 1.0)

    def kl(beta: float) -> float:
        weights = [q * math.exp(r / beta) for q, r in zip(ref, reward, strict=True)]
        return sum(w / sum(weights) * math.log(w / sum(weights) / q) for w, q in zip(weights, ref, strict=True))

    mean = sum(q * r for q, r in zip(ref, reward, strict=True))
    variance = sum(q * (r - mean) ** 2 for q, r in zip(ref, reward, strict=True))
    assert kl(30.0) == pytest.approx(variance / (2 * 30.0**2), rel=0.02)
    slopes = [math.log(kl(beta) / kl(1.1 * beta)) / math.log(1.1) for beta in (30.0, 1.0, 0.1, 0.03)]
    assert slopes[0] == pytest.approx(Plant().slope, rel=0.02)
    assert max(slopes) < 2.3 and slopes[3] < 0.1


def in_band(seen: list[float]) -> float:
    """The share of the steps after 50 within the band of 1.5."""
    return sum(1 / 1.5 <= ratio <= 1.5 for ratio in seen[50:]) / len(seen[50:])


@pytest.mark.parametrize("offset", [0.5, 2.0])
@pytest.mark.parametrize("lag", [2.0, 5.0, 10.0])
@pytest.mark.parametrize("kind", ADAPTIVE)
def test_in_band_after_50_steps(kind: str, lag: float, offset: float) -> None:
    """From a coefficient half or twice the right one: KL starts at 4 times or a quarter of its target."""
    for seed in range(3):
        made = make(kind, coef=0.2, target=TARGET)
        assert isinstance(made, Adaptive)
        seen = simulate(made, balance=0.2 * offset, plant=Plant(lag=lag), episodes=EPISODES, seed=seed)
        assert in_band(seen) >= 0.8
        assert in_band(simulate(_blind(0.2), balance=0.2 * offset, plant=Plant(lag=lag), seed=seed)) == 0.0


def _blind(coef: float) -> Exponential:
    return Exponential(coef=coef, rate=1e-9)


def test_the_entropy_controller_holds_its_target() -> None:
    for balance in (0.02, 0.1):
        assert in_band(simulate(entropy_target(), balance=balance, plant=Plant(slope=0.5))) >= 0.95


def test_two_speed_settles_its_upper_quartile_and_exponential_its_middle() -> None:
    """What is promised in their docstrings."""

    def above(kind: str) -> float:
        made = make(kind, coef=0.2, target=TARGET)
        assert isinstance(made, Adaptive)
        seen: list[float] = []
        original, update = made.target, type(made).update

        def watching(self: Adaptive, kl: float, n: int = 1) -> float:
            seen.append(kl / original)
            return update(self, kl, n)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(made), "update", watching)
            simulate(made, balance=0.2, steps=4000)
        return sum(ratio > 1 for ratio in seen) / len(seen)

    assert above("two_speed") == pytest.approx(0.254, abs=0.02)
    assert above("exponential") == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("kind", ADAPTIVE)
@pytest.mark.parametrize(("stuck", "end"), [(50.0, "max_coef"), (0.0, "min_coef")])
def test_leaves_saturation_within_10_updates(kind: str, stuck: float, end: str) -> None:
    """After 3000 steps at a bound. An integral that winds up meanwhile would keep it there for as long again."""
    made = make(kind, coef=0.2, target=TARGET, min_coef=0.1, max_coef=0.4)
    for _ in range(3000):
        made.update(stuck * TARGET, EPISODES)
    assert made.coef == pytest.approx(getattr(made, end))
    back = 0.5 if end == "max_coef" else 2.0
    for _ in range(10):
        made.update(back * TARGET, EPISODES)
    assert made.coef != pytest.approx(getattr(made, end), rel=1e-3)


def test_a_wound_up_integral_would_be_caught() -> None:
    """The test above can fail: without conditional integration, PID stays at its bound."""
    pid = make("pid", coef=0.2, target=TARGET, min_coef=0.1, max_coef=0.4)
    for _ in range(3000):
        pid.update(0.5, 1)
    state = pid.state_dict()
    assert abs(state["integral"]) <= math.log(2)
    pid.load_state_dict(state | {"integral": 3000 * 0.05})
    for _ in range(10):
        pid.update(0.5 * TARGET)
    assert pid.coef == 0.4


@pytest.mark.parametrize("kind", ADAPTIVE)
def test_every_default_is_stable(kind: str) -> None:
    for target in (1e-4, 1e-2, 1.0, 100.0):
        for coef in (1e-3, 0.04, 0.2, 10.0):
            made = make(kind, coef=coef, target=target)
            before = made.state_dict()
            check_stability(made, episodes=1)
            check_stability(made, episodes=10_000)
            assert made.state_dict() == before, "checking changes nothing"
    check_stability(entropy_target())
    check_stability(make("fixed", coef=0.0))


@pytest.mark.parametrize(
    ("kind", "settings", "blamed"),
    [
        ("dead_band", {"speed": 5.0}, "speed"),
        ("exponential", {"rate": 5.0}, "rate"),
        ("two_speed", {"up": 4.0}, "up"),
        ("linear", {"factor": 40.0, "max_step": 0.024}, "factor"),
        ("pid", {"kp": 10.0}, "kp"),
        ("pid", {"ki": 5.0}, "ki"),
        ("pid", {"kd": 10.0}, "kd"),
        ("pid", {"ki": 5.0, "kp": 0.1}, "ki"),
    ],
)
def test_a_loop_that_swings_is_refused_naming_the_gain(kind: str, settings: dict[str, float], blamed: str) -> None:
    with pytest.raises(NovaError, match=f"{blamed}=") as caught:
        check_stability(make(kind, coef=0.2, target=TARGET, **settings))
    assert caught.value.where == f"kl.{blamed}" and caught.value.fix


@pytest.mark.parametrize("kind", SYMMETRIC)
def test_a_loop_that_drives_the_wrong_way_does_not_settle(kind: str) -> None:
    """The plant with its sign turned: what a controller with a sign error would do."""
    with pytest.raises(NovaError):
        check_stability(make(kind, coef=0.2, target=TARGET), episodes=10_000, plant=Plant(slope=-2.0))


@pytest.mark.parametrize(
    ("kind", "settings", "where"),
    [
        *[(kind, {"coef": 0.0}, "kl.coef") for kind in ADAPTIVE],
        *[(kind, {"target": 0.0}, "kl.target") for kind in ADAPTIVE],
        *[(kind, {"target": math.nan}, "kl.target") for kind in ADAPTIVE],
        *[(kind, {"min_coef": 0.0}, "kl.min_coef") for kind in ADAPTIVE],
        *[(kind, {"coef": 101.0}, "kl.coef") for kind in ("fixed", *ADAPTIVE)],
        *[(kind, {"min_coef": 0.3, "max_coef": 0.3}, "kl.min_coef") for kind in ("fixed", *ADAPTIVE)],
        ("fixed", {"coef": -0.1}, "kl.coef"),
        ("fixed", {"coef": math.inf}, "kl.coef"),
        ("fixed", {"speed": 2.0}, "kl.speed"),
        ("dead_band", {"speed": 1.0}, "kl.speed"),
        ("dead_band", {"band": 0.9}, "kl.band"),
        ("ziegler", {"clip": 1.0}, "kl.clip"),
        ("ziegler", {"horizon": 0}, "kl.horizon"),
        ("exponential", {"rate": -0.1}, "kl.rate"),
        ("two_speed", {"down": 1.0}, "kl.down"),
        ("linear", {"factor": 5.0}, "kl.max_step"),
        ("pid", {"kp": -0.1}, "kl.kp"),
        ("pid", {"ki": 0.0}, "kl.ki"),
        ("pid", {"smoothing": 0.0}, "kl.smoothing"),
        ("schedule", {}, "kl.total_steps"),
        ("schedule", {"total_steps": 0}, "kl.total_steps"),
        ("schedule", {"total_steps": 9, "shape": "square"}, "kl.shape"),
        ("schedule", {"total_steps": 9, "warmup_frac": 1.0}, "kl.warmup_frac"),
        ("schedule", {"total_steps": 9, "final_coef": 1e3}, "kl.final_coef"),
        ("clairvoyant", {}, "kl.controller"),
    ],
)
def test_bad_settings_are_refused(kind: str, settings: dict[str, Any], where: str) -> None:
    with pytest.raises(NovaError) as caught:
        make(kind, **({"coef": 0.2} | settings))
    assert caught.value.where == where and caught.value.fix


def test_the_entropy_controller_says_that_it_is_about_entropy() -> None:
    with pytest.raises(NovaError) as caught:
        entropy_target(0.0)
    assert caught.value.where == "entropy.coef"


def test_the_documents_names() -> None:
    assert type(make("adaptive_kl", coef=0.2)) is type(make("adaptive", coef=0.2)) is type(make("dead_band", coef=0.2))
    assert type(make("constant", coef=0.0)) is type(make("fixed", coef=0.0))
    assert SHAPES == ("constant", "linear", "cosine", "exponential", "warmup_cosine")


def test_controllers_need_no_torch() -> None:
    names = ", ".join(f"novarl.control.{name}" for name in ("stability", "controllers", "constraints"))
    code = f"import sys, {names}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch" not in done.stdout.split()
