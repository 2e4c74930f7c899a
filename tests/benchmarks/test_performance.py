"""What `make bench` makes of what it measures: ratios, intervals, goals, the page and the line. Nothing is timed."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import floors, performance, performance_page, workloads
from benchmarks.cases import TEMPLATE, Offline, Rows, write_rows
from benchmarks.floors import Rates, Size, floor_seconds, grouped, stated_peak
from benchmarks.launch import Timeline, launch
from benchmarks.models import Shape, build, obey
from benchmarks.performance import (
    contenders,
    judge,
    kept_record,
    line,
    merged,
    ratio_of_medians,
    winner,
)
from benchmarks.reaching import ahead_floor, distinct_share, reaching_floor
from benchmarks.sides import Place, Run, _summed
from benchmarks.workloads import WORKLOADS, Goal, Workload, fast, on
from novarl.core.errors import NovaError
from novarl.core.seeds import derive
from novarl.data.stream import Stream

RATES = Rates(
    train_fp32=100.0, decode_fp32=50.0, train_bf16=10.0, decode_bf16=10.0, bandwidth=40.0, torch=1.5, transformers=3.0
)


def runs(*seconds: float) -> list[Run]:
    return [
        Run({"seconds": value, "memory_mb": 10 * value, "tokens": 5.0}, [1, 2, 9], {"version": "x"})
        for value in seconds
    ]


def record(name: str) -> dict[str, Any]:
    """A record of a workload as `measure` leaves it, with every number that its goals ask for."""
    workload = WORKLOADS[name]
    numbers = {goal.number for goal in workload.goals} | set(workload.shown) | {workload.scout}
    least = {"seconds": 1.0, "generation": 0.4, "learn": 0.6}
    shares = {"seconds_share": 0.5, "generation_share": 0.4, "learn_share": 0.6}
    found = {side: [Run(dict.fromkeys(numbers, 2.0) | shares, [3, 4], {"v": 1})] * 2 for side in workload.sides}
    best = winner(workload, found)
    return {
        "date": "2026-01-01",
        "rounds": 2,
        "best": best,
        "goals": {goal.name: judge(goal, found, best) for goal in workload.goals},
        "floors": dict.fromkeys(workload.floors, least),
        "rates": asdict(RATES),
        "again": [],
        "threads": 2,
        "machine": {"processor": "p", "commit": "c", "device": "cpu"},
        "runs": {side: [asdict(run) for run in past] for side, past in found.items()},
    }


def test_the_ratio_is_that_of_medians_and_its_interval_holds_it() -> None:
    value, low, high = ratio_of_medians([2.0, 4.0, 100.0], [1.0, 2.0, 3.0])
    assert value == 2.0
    assert low <= value <= high


def test_what_slows_a_whole_round_cancels() -> None:
    rng = random.Random(0)
    slow = [rng.uniform(1, 3) for _ in range(9)]
    _, low, high = ratio_of_medians([3 * s for s in slow], slow)
    assert (low, high) == pytest.approx((3.0, 3.0))
    _, low, high = ratio_of_medians([3 * s for s in slow], slow[:-1])  # not in pairs: the noise shows
    assert high - low > 0.3


def test_one_column_is_judged_by_itself() -> None:
    value, low, high = ratio_of_medians([1.0, 2.0, 3.0])
    assert (value, low >= 1.0, high <= 3.0) == (2.0, True, True)


@pytest.mark.parametrize(
    ("goal", "met"),
    [
        (Goal("g", "seconds", "trl", "ours", at_least=2.0), True),
        (Goal("g", "seconds", "trl", "ours", at_least=2.01), False),
        (Goal("g", "seconds", "ours", "trl", at_most=0.5), True),
        (Goal("g", "seconds", "ours", "trl", at_most=0.49), False),
        (Goal("g", "seconds", "ours", at_most=1.0), True),
        (Goal("g", "seconds", "best", "ours", at_least=2.0), True),
        (fast("seconds", "trl", 2.0), True),
        (Goal("g", "seconds", "ours", at_most=1.0, impossible="no such unit"), None),
    ],
)
def test_a_goal_is_met_or_missed_by_its_direction(goal: Goal, met: bool | None) -> None:
    found = judge(goal, {"ours": runs(1, 1, 1), "trl": runs(2, 2, 2)}, best="trl")
    assert found["met"] is met


def test_best_is_the_fastest_that_competes() -> None:
    workload = WORKLOADS["W1"]
    found = {"ours": runs(1), "trl 8": runs(4), "trl 16": runs(3), "trl 64": runs(5)}
    assert winner(workload, found) == "trl 16"


def test_who_is_close_at_first_stays_and_one_lucky_round_does_not_win() -> None:
    workload = WORKLOADS["W1"]
    found = {"ours": runs(1), "trl 8": runs(3.1, 3.0, 3.0), "trl 16": runs(3.0, 3.2, 3.2), "trl 64": runs(3.9)}
    assert contenders(workload, found) == ["trl 8", "trl 16"]
    assert winner(workload, found) == "trl 8"


def test_the_line_has_the_promised_keys_and_the_first_goal_as_ratio() -> None:
    found = json.loads(json.dumps(line("W2", record("W2"))))
    assert list(found) == (
        ["workload", "ratio", "ratio_interval", "goals", "ours", "peer", "floor", "threads", "machine"]
    )
    first = next(iter(found["goals"].values()))
    assert found["ratio"] == first["value"] and set(first) == {"value", "goal", "met"}
    assert found["peer"]["trl 64"]["v"] == 1


def test_a_workload_changes_its_own_section_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(performance.report, "RESULTS", tmp_path)
    for name in ("W7", "W1", "sinks"):
        performance_page.write("here", merged(performance_page.load("here"), name, record(name)))
    before = (tmp_path / "here.md").read_text()
    changed = record("W1") | {"date": "2027-07-07"}
    performance_page.write("here", merged(performance_page.load("here"), "W1", changed))
    after = (tmp_path / "here.md").read_text()
    assert list(performance_page.load("here")) == ["W1", "W7", "sinks"]
    assert before.count("2027-07-07") == 0 and after.count("2027-07-07") == 1
    assert before.replace("2026-01-01, p", "2027-07-07, p", 1) == after


def test_sides_are_kept_where_they_are_there_and_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    past = {"machine": {"processor": "p", "device": "cpu", "commit": "a"}, "runs": {}}
    monkeypatch.setattr(performance, "load", lambda page: {"W1": past})
    here = past["machine"] | {"commit": "b"}
    assert kept_record("W1", ["ours", "trl"], ["ours"], "here", here) is past
    for change, said in (({"processor": "q"}, "q, cpu"), ({"device": "H100"}, "p, H100")):
        with pytest.raises(NovaError, match=rf"--again: .* W1 were measured on p, cpu, and this is {said} \("):
            kept_record("W1", ["ours", "trl"], ["ours"], "here", here | change)
    with pytest.raises(NovaError, match=r"--again: W1 has no side 'nope' \(one of ours, trl\)"):
        kept_record("W1", ["ours", "trl"], ["ours", "nope"], "here", here)
    with pytest.raises(NovaError, match="--again: here holds nothing of W2 yet"):
        kept_record("W2", ["ours"], ["ours"], "here", here)


def test_each_device_has_what_it_can_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "has_bf16", lambda: False)
    cpu, gpu = on("cpu"), on("cuda")
    assert set(WORKLOADS) - set(cpu) == {"G1", "G1-compiled", "G2", "G2-compiled"}
    assert set(WORKLOADS) - set(gpu) == {"memory"}
    assert "vllm" in cpu["W7"].sides and "vllm" not in gpu["W7"].sides
    assert "ours bf16" in gpu["W1"].sides and "ours bf16" in gpu["W1"].floors
    assert not {"ours bf16", "trl bf16"} & {*cpu["W1"].sides, *cpu["W1"].floors, *cpu["W4"].sides}
    assert [bool(goal.impossible) for goal in cpu["W1"].goals] == [False, False, True, True]
    assert [goal.name for goal in gpu["W7"].goals if goal.impossible] == ["speed, vLLM"]
    monkeypatch.setattr(workloads, "has_bf16", lambda: True)
    assert "ours bf16" in on("cpu")["W1"].sides and not any(goal.impossible for goal in on("cpu")["W1"].goals)


def test_what_cannot_be_measured_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for arguments, said in (
        (["--device", "cuda"], "device=cuda: this device is not available"),
        (["--workload", "G1"], "--device cpu: G1 is not for it (one of W1, "),
        (["--rounds", "0"], "--rounds: must be at least 1, got 0"),
        (["--workload", "W9", "--again", "nope"], "--again: W9 has no side 'nope' (one of ours, built-in, trl)"),
    ):
        monkeypatch.setattr("sys.argv", ["performance", *arguments])
        assert performance.main() == 2
        found = capsys.readouterr().err
        assert found.startswith(said) and found.count("\n") == 1


def test_the_stated_peak_of_a_gpu_by_its_name() -> None:
    assert stated_peak("NVIDIA H100 80GB HBM3") == 989_400 and stated_peak("NVIDIA H100 PCIe") == 756_000
    assert stated_peak("NVIDIA A100-SXM4-80GB") == 312_000 and stated_peak("NVIDIA L40S") == 362_000
    assert stated_peak("cpu") is None and stated_peak("NVIDIA H1000") is None


def test_the_share_of_the_peak_by_hand(tmp_path: Path) -> None:
    """Training FLOPs over the seconds at the peak, not at the measured rate."""
    case = Offline("sft", Shape("tiny-8", ((1.0, 8.0),), {}), {"question": (10, 10), "answer": (5, 5)}, batch=4, lr=1.0)
    rates = replace(RATES, peak_bf16=2000.0)
    found = case.at_peak(tmp_path, {}, rates)
    size = Size.of(tmp_path / "tiny-8")
    assert found == {"seconds": pytest.approx(4 * grouped(size, 10 + TEMPLATE, 1, [6])[2] / 2000e9)}
    assert found["seconds"] == pytest.approx(case.floor(tmp_path, {}, rates)["seconds"] / 20)


def test_on_a_gpu_its_memory_counts() -> None:
    watched = Timeline(0.0, [], [(0.5, 100.0), (2.0, 900.0)])
    steps = [{"time": 1.0, "tokens": 1.0, "learn": 0.5}, {"time": 2.0, "tokens": 1.0, "learn": 0.5}]
    assert _summed(watched, 0.6, steps, [], {}).numbers["memory_mb"] == 800
    steps = [step | {"device_mb": mb} for step, mb in zip(steps, (30.0, 40.0), strict=True)]
    assert _summed(watched, 0.6, steps, [], {}).numbers["memory_mb"] == 40


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_has_a_section_and_goals_about_its_sides(name: str) -> None:
    workload = WORKLOADS[name]
    assert "ours" in workload.sides and set(workload.best) <= set(workload.sides)
    text = performance_page.section(name, record(name))
    for goal in workload.goals:
        assert goal.name in text
        assert (goal.at_least is None) != (goal.at_most is None)


def test_a_missed_goal_is_said_so() -> None:
    found = record("W1")
    found["goals"]["speed"] |= {"met": False}
    assert "**NO**" in performance_page.section("W1", found)


def test_the_rate_of_products_that_go_on_is_said_where_it_was_measured() -> None:
    found = record("W8")
    assert "100 GFLOP/s in training's products, 50" in performance_page.section("W8", found)
    found["rates"]["lasting_fp32"] = 80.0
    assert "100 GFLOP/s in training's products (80 if they go on for 5 s), 50" in performance_page.section("W8", found)


def test_what_goes_on_takes_its_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, done = [0.0], []

    def work() -> None:
        clock[0] += (1.0, 5.0)[len(done) % 2]
        done.append(1)

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    assert floors._lasting(work, lambda: None, 10.0) == 3.0 and len(done) == 4
    assert floors._best(work, lambda: None, 2) == 1.0


def test_floor_of_a_step_by_hand() -> None:
    size = Size(layers=1, stack=10, last=3, head=4, attention=2)
    # one group, prompt of 2, answers of 1 and 3: pairs 3 + (2 + 1) + (6 + 6) = 18; 7 weights meet every token, 3 + 4
    # those that are read
    found = floor_seconds(size, RATES, 2, 1, [1, 3])
    prompts, decoding = 2 * (7 * 2 + 7 * 1) + 8 * 3, 2 * (7 * 4 + 7 * 4) + 8 * 15
    learnt = 3 * (2 * (7 * 6 + 7 * 4) + 8 * 18)
    assert found["learn"] == pytest.approx(learnt / 100e9)
    assert found["generation"] == pytest.approx(prompts / 100e9 + max(decoding / 50e9, 3 * 4 * 14 / 40e9))
    assert grouped(size, 2, 1, [1, 3])[2] == learnt


def test_floors_of_reaching_a_score_by_hand(tmp_path: Path) -> None:
    shape = {"hidden_size": 2, "head_dim": 2, "num_attention_heads": 1, "num_key_value_heads": 1}
    shape |= {"intermediate_size": 1, "num_hidden_layers": 1, "vocab_size": 3}
    folder = tmp_path / "start" / "checkpoints" / "warmup-000001" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(shape))
    mine = {"steps": 3.0, "start": 2.0, "prompt": 4.0, "answer": 5.0, "distinct": 2.0, "generation": 0.3, "learn": 0.2}
    found = reaching_floor(tmp_path, {"ours": Run(mine)}, RATES)
    step = floor_seconds(Size.of(folder), RATES, 4, 16, [2.0] * 128)["seconds"]
    assert step > 0 and found == {"seconds": 1.5 + 3 * step, "start": 1.5 + step, "step_seconds": step}
    # The first step and two more, each as long as the longer of its two stages.
    assert ahead_floor(tmp_path, {"in turn": Run(mine)}, RATES)["seconds"] == pytest.approx(2.0 + 2 * 0.3)


def test_what_answers_to_one_prompt_begin_with_is_computed_once(tmp_path: Path) -> None:
    answers = [(0, "ab", "stop"), (0, "ab", "stop"), (0, "ac", "length"), (1, "ab", "stop")]
    lines = [json.dumps({"group": group, "text": text, "finish_reason": end}) for group, text, end in answers]
    (tmp_path / "step.jsonl").write_text("\n".join(lines))
    # ab and its end, c beside b; and another prompt's three: 7 of 11.
    assert distinct_share(tmp_path / "step.jsonl") == pytest.approx(7 / 11)


def test_a_round_has_the_better_rates_of_before_and_after_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    looks = [replace(RATES, train_fp32=rate, torch=start) for rate, start in ((100.0, 1.0), (50.0, 3.0), (80.0, 2.0))]
    left: list[Path] = []

    def side(place: Place) -> Run:
        place.out.mkdir(parents=True)
        left.append(place.out)
        return Run({"learn": 1.0})

    def floor(home: Path, found: object, rates: Rates) -> dict[str, float]:
        return {"learn": rates.train_fp32 / 200 + rates.torch}

    monkeypatch.setattr(performance, "_rates", lambda place: looks[len(left)])
    workload = Workload("w", {"ours": side}, [Goal("g", "learn_share", "ours", at_least=0.8)], floors={"ours": floor})
    found = performance.measure("w", workload, Place(tmp_path, tmp_path, 0), rounds=2)
    assert [run["numbers"]["learn_share"] for run in found["runs"]["ours"]] == [1.5, 2.4]
    assert found["rates"]["train_fp32"] == 90.0 and found["rates"]["torch"] == 1.5
    assert len(left) == 2 and not any(path.exists() for path in left)


@pytest.mark.parametrize(
    ("again", "order"), [((), ["a", "b", "idle", "b", "a", "a", "b"]), (("idle",), ["idle"]), (("b",), ["b", "b", "b"])]
)
def test_each_round_begins_with_another_side(
    again: tuple[str, ...], order: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(performance, "_rates", lambda place: RATES)
    ran: list[str] = []

    def side(name: str, place: Place) -> Run:
        place.out.mkdir(parents=True)
        ran.append(name)
        return Run({"seconds": 1.0})

    sides = {name: partial(side, name) for name in ("a", "b", "idle")}
    workload = Workload("w", sides, [Goal("g", "seconds", "b", "a", at_least=1.0)])
    past = {name: [asdict(Run({"seconds": 1.0}))] * 3 for name in sides}
    kept = {"runs": past} if again else None
    performance.measure("w", workload, Place(tmp_path, tmp_path, 0), rounds=3, again=again, kept=kept)
    assert ran == order


@pytest.mark.parametrize(
    ("goal", "at_floor"),
    [
        (Goal("g", "seconds", "trl", "ours", at_least=2.0), 4.0),
        (Goal("g", "seconds_per_token", "trl", "ours", at_least=2.0), 4.0),
        (Goal("g", "seconds", "ours", "trl", at_most=0.5), 0.25),
        (Goal("g", "memory_mb", "ours", "trl", at_most=0.5), None),
        (Goal("g", "seconds", "trl", at_most=0.5), None),
    ],
)
def test_what_a_goal_would_be_at_the_floor(goal: Goal, at_floor: float | None) -> None:
    """Ours takes 1 where the floor is a half, the peer 2."""
    found = {"ours": runs(1.0), "trl": runs(2.0)}
    for side in found.values():
        side[0].numbers["seconds_per_token"] = side[0].numbers["seconds"]
    found["ours"][0].numbers["seconds_share"] = 0.5
    factor = performance.floor_factor(goal, found)
    value = judge(goal, found, "")["value"]
    assert (None if factor is None else value * factor) == at_floor


@pytest.mark.parametrize(
    ("direction", "at_floor", "said"),
    [("at least", 1.9, True), ("at least", 2.1, False), ("at most", 2.1, True), ("at most", 1.9, False)],
)
def test_a_goal_beyond_the_floor_is_said_to_be(direction: str, at_floor: float, said: bool) -> None:
    found = record("W1")
    found["goals"]["speed"] |= {"goal": 2.0, "direction": direction, "at_floor": at_floor}
    assert ("at the floor)" in performance_page.section("W1", found)) == said


def test_rows_follow_their_law_and_come_in_our_order(tmp_path: Path) -> None:
    rows = Rows("some", 400, {"text": (10, 10, 50)}).draw()
    lengths = sorted(len(row["text"]) for row in rows)
    assert lengths[0] == lengths[150] == 10 and 40 < lengths[-1] <= 50
    path = write_rows(tmp_path / "rows.jsonl", rows, order="rows", seed=3)
    taken = [index for _, index in Stream(400, derive(3, "rows")).take(400)]
    assert [json.loads(text) for text in path.read_text().splitlines()] == [rows[index] for index in taken]


def test_answers_end_as_often_as_the_law_says() -> None:
    law = ((0.5, 4.0), (0.5, 40.0))
    model = build(Shape("tiny-law", law, {}))
    obey(model, law, end=257)
    weight = model.model.embed_tokens.weight
    for kind, (_, mean) in enumerate(law, start=1):
        members = weight[:, kind].eq(1.0).nonzero().flatten()
        members = members[members < 256]
        text = members[torch.randint(len(members), (8, 40), generator=torch.Generator().manual_seed(7))]
        with torch.no_grad():
            states = model(text, position_ids=torch.arange(40).expand(8, 40)).last_hidden_state
            odds = (states @ weight.T).softmax(-1)
        assert odds[..., 257].mean().item() == pytest.approx(1 / mean, rel=0.1)
        assert (odds[..., members].sum(-1) + odds[..., 257]).mean() > 0.99  # kinds do not mix


def test_a_command_is_watched_from_outside(tmp_path: Path) -> None:
    diary = tmp_path / "diary.jsonl"
    code = f"import time; b = bytearray(60_000_000); print('{{}}', file=open({str(diary)!r}, 'w')); time.sleep(1.0)"
    found = launch(["python3", "-c", code], [diary], tmp_path, env={})
    assert [line for _, line in found.lines] == [{}]
    assert max(mb for _, mb in found.memory) > 60
    with pytest.raises(SystemExit, match="ended with 3"):
        launch(["sh", "-c", "exit 3"], [diary], tmp_path / "second", env={})
