"""Faults between sampler and learner are told apart: on simulated policies, and in a real run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.alarm_faults import FAULTS
from novarl.observe.rollouts import RolloutRow
from novarl.observe.run import load_run
from novarl.observe.stability import Setting, review
from novarl.observe.stability.columns import newest_setting, row_columns, step_columns
from novarl.observe.stability.faults import PLUMBING
from novarl.observe.stability.plumbing import measure

VOCABULARY, LENGTH, ROWS = 12, 5, 48
Logits = NDArray[np.float64]


@cache
def direction(step: int, context: tuple[int, ...]) -> Logits:
    """What the update before `step` adds to the logits of a context; before step 1, the policy itself."""
    draw = np.random.default_rng([step, *context, 7])
    return draw.normal(size=VOCABULARY) * (1.5 if step == 1 else 0.15)


def logits(step: int, context: tuple[int, ...]) -> Logits:
    return np.sum([direction(each, context) for each in range(1, step + 1)], axis=0)


def log_softmax(values: Logits) -> Logits:
    return values - np.logaddexp.reduce(values)


@dataclass
class Side:
    """How one side computes the log-probabilities of a context at a step."""

    temperature: float = 1.0
    lag: Callable[[int], int] = lambda step: step
    """The step whose weights it has."""
    top: int = VOCABULARY
    shift: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda context: context
    noise: float = 0.0
    repeated: bool = True
    """Whether equal contexts have equal noise."""
    _draw: np.random.Generator = field(default_factory=lambda: np.random.default_rng(5))

    def logp(self, step: int, context: tuple[int, ...]) -> Logits:
        values = logits(self.lag(step), self.shift(context)) / self.temperature
        if self.noise:
            draw = np.random.default_rng([3, *context]) if self.repeated else self._draw
            values = values + draw.normal(size=VOCABULARY) * self.noise
        cut = np.sort(values)[-self.top]
        return log_softmax(np.where(values >= cut, values, -np.inf))


HEALTHY = Side()
SHORT, LONG = "short", "a longer prompt"


def simulated(sampler: Side, learner: Side = HEALTHY, *, onset: int = 3, steps: int = 8) -> dict[int, list[RolloutRow]]:
    """Rollouts of a run whose sampler or learner is faulty from step `onset` on. Half of the prompts are short."""
    found = {}
    for step in range(1, steps + 1):
        mu, pi = (sampler, learner) if step >= onset else (HEALTHY, HEALTHY)
        draw, rows = np.random.default_rng(step), []
        for index in range(ROWS):
            prompt = (SHORT, LONG)[index % 2]
            context: tuple[int, ...] = (len(prompt),)
            columns: dict[str, list[float]] = {"behavior_logp": [], "old_logp": [], "entropy": [], "ref_logp": []}
            tokens = []
            for _ in range(LENGTH):
                sampled, learnt = mu.logp(step, context), pi.logp(step, context)
                token = int(draw.choice(VOCABULARY, p=np.exp(sampled)))
                columns["behavior_logp"].append(float(sampled[token]))
                columns["old_logp"].append(float(learnt[token]))
                columns["entropy"].append(float(-(np.exp(learnt) * learnt).sum()))
                columns["ref_logp"].append(float(HEALTHY.logp(1, context)[token]))
                tokens.append(token)
                context = (*context, token)
            given = {name: tuple(values) for name, values in columns.items()}
            rows.append(replace(row(prompt, index), tokens=tuple(tokens), **given))
        found[step] = rows
    return found


def row(prompt: str, index: int) -> RolloutRow:
    return RolloutRow(prompt, prompt, "", None, 1.0, {}, "done", index // 4, index % 4, [], None)


def records(steps: int) -> list[dict[str, float]]:
    """Metrics of updates as large as those of `direction`."""
    return [{"step": float(step), "kl": 0.15**2 / 2} for step in range(1, steps + 1)]


def first(rollouts: dict[int, list[RolloutRow]], **setting: object) -> str | None:
    """The name that the run's first plumbing alert gives."""
    found = review(records(len(rollouts)), rollouts, setting=Setting(dtype="float32", **setting))  # type: ignore[arg-type]
    return found[0].alert if found else None


def padded(context: tuple[int, ...]) -> tuple[int, ...]:
    return (99, *context) if context[0] == len(SHORT) else context


FAULTY: dict[str, tuple[Side, Side]] = {
    "dropout": (HEALTHY, Side(noise=0.2, repeated=False)),
    "truncated_sampling": (Side(top=8), HEALTHY),
    "padding": (Side(shift=padded), HEALTHY),
    "temperature": (Side(temperature=0.8), HEALTHY),
    "template": (Side(shift=lambda context: (50, *context)), HEALTHY),
    "stale_weights": (Side(lag=lambda step: step - 1), HEALTHY),
    "dtype": (HEALTHY, Side(noise=0.003)),
}


def test_a_healthy_run_has_no_plumbing_fault() -> None:
    assert first(simulated(HEALTHY)) is None


@pytest.mark.parametrize("fault", FAULTY)
def test_a_fault_is_named(fault: str) -> None:
    assert first(simulated(*FAULTY[fault])) == fault


@pytest.mark.parametrize("temperature", [0.7, 0.9, 1.1, 1.4])
def test_the_ratio_of_temperatures_is_told(temperature: float) -> None:
    rollouts = simulated(Side(temperature=temperature))
    alerts = review(records(8), rollouts, setting=Setting(dtype="float32"))
    assert [alert.alert for alert in alerts] == ["temperature"]
    columns = row_columns(rollouts[8])
    assert columns is not None and measure(columns).scale == pytest.approx(1.0 / temperature, rel=0.15)


def test_an_adapter_that_never_arrives_has_the_base_models_log_probabilities() -> None:
    base = simulated(Side(lag=lambda step: 1), onset=1)
    assert first(base, adapters=True) == "adapter_not_delivered"
    assert first(base) == "stale_weights", "without adapters, it is a sampler that is never updated"
    unknown = {step: [replace(one, ref_logp=()) for one in rows] for step, rows in base.items()}
    assert first(unknown, adapters=True) == "adapter_not_delivered"
    late = simulated(Side(lag=lambda step: max(1, step - 1)), onset=1)
    assert first({step: [replace(one, ref_logp=()) for one in rows] for step, rows in late.items()}, adapters=True) == (
        "stale_weights"
    )


def test_tokens_that_were_encoded_again() -> None:
    rollouts = simulated(HEALTHY)
    for step in (4, 5):
        one = rollouts[step][3]
        rollouts[step][3] = replace(one, tokens=(99, *one.tokens[1:]), old_logp=(-9.0, *one.old_logp[1:]))
    assert first(rollouts) == "template"


def test_a_lag_on_purpose_is_no_fault() -> None:
    late = simulated(Side(lag=lambda step: max(1, step - 1)), onset=1)
    assert first(late, lag=1) is None
    assert first(simulated(Side(temperature=0.8)), lag=1) == "temperature"


def test_rounding_of_sixteen_bits_is_no_fault_where_it_is_expected() -> None:
    rough = simulated(HEALTHY, Side(noise=0.01), onset=1)
    assert first(rough) == "dtype"
    assert review(records(8), rough, setting=Setting(dtype="bfloat16")) == []
    assert review(records(8), rough) == [], "and where the precision is not known"


def test_every_plumbing_fault_is_tried() -> None:
    assert {*FAULTY, "adapter_not_delivered"} == {rule.name for rule in PLUMBING}
    assert {fault.expected for fault in FAULTS.values() if fault.kind == "plumbing"} == {rule.name for rule in PLUMBING}


def test_rows_without_both_sides_say_nothing() -> None:
    assert row_columns([row(SHORT, 0)]) is None
    assert review(records(2), {1: [row(SHORT, 0)]}) == []


def test_a_real_run_names_its_fault_and_its_log_reads_the_same(tmp_path: Path) -> None:
    import novarl

    fault = FAULTS["temperature"]
    assert fault.engine is not None
    build = fault.engine
    prompts = [{"prompt": f"say {'x' * (index % 3)}", "answer": ""} for index in range(8)]
    with novarl.RL(
        model="tiny",
        prompts=prompts,
        reward=lambda messages, answer: float(len(messages[-1]["content"]) % 2),
        algo="rloo",
        steps=3,
        prompts_per_rollout=4,
        responses_per_prompt=4,
        rollout={"max_tokens": 4},
        eval={"n": 0},
        threads=1,
        log={"console": False, "tensorboard": False},
        run_dir=str(tmp_path / "run"),
        engine=lambda policy: build(policy, 2),
    ) as trainer:
        trainer.run()
    run = load_run(tmp_path / "run")
    raised = [event for event in run.events if event["kind"] == "alert" and "alert" in event]
    assert ("temperature", 2) in [(event["alert"], event["step"]) for event in raised]
    setting = newest_setting(run.path)
    assert setting == Setting(dtype="float32", adapters=False, lag=0)
    again = review(run.metrics, {step: run.rollouts(step) for step in run.steps()}, setting=setting)
    assert [(alert.alert, alert.step) for alert in again] == [(event["alert"], event["step"]) for event in raised]
    packed, rows = step_columns(run.path / "rollouts" / "step-000002"), row_columns(run.rollouts(2))
    assert packed is not None and rows is not None
    ours, theirs = measure(packed), measure(rows)
    for name in ("tokens", "mean", "size", "square", "largest", "fit", "scale", "first"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), nan_ok=True), name
    assert not math.isnan(ours.long) and not math.isnan(theirs.long)
