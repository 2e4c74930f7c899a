"""A run with several objectives leaves a front: what its evaluations scored, in the checkpoint, as JSON and drawn."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from novarl.compose.govern import build_front
from novarl.config.adapting import MultiObjective
from novarl.core.checkpoint import open_checkpoint
from novarl.core.rundir import RunDir
from novarl.core.types import Prompt, Rollout, Scored, Sequence
from novarl.distributed.ranks import Ranks
from novarl.loops.evaluate import Evaluation
from novarl.run.pareto_front import Front, measured
from tests.compose.harness import ON_TASK, finished, metrics, summary

SECTION = MultiObjective.model_validate(
    {"enabled": True, "objectives": {"right": {"direction": "max"}, "length": {"direction": "min"}}}
)


@dataclass
class FakeSession:
    """What a front needs of a session."""

    rundir: RunDir
    ranks: Ranks = field(default_factory=Ranks)
    facts: dict[str, Any] = field(default_factory=dict)


def answer(right: float | None, tokens: int) -> Scored:
    mask, zeros = (False,) + (True,) * tokens, (0.0,) * (tokens + 1)
    sequence = Sequence((1,) * (tokens + 1), mask, zeros, zeros, (0,) * (tokens + 1))
    rollout = Rollout(Prompt("p", (1,), ()), 0, 0, (sequence,), (), "")
    return Scored(rollout, {} if right is None else {"right": right}, None if right is None else 2 * right)


def evaluation(*rows: Scored) -> Evaluation:
    return Evaluation(score=0.0, interval=(0.0, 0.0), n=len(rows), pass_at={}, failed=0, rows=rows)


def front(folder: Path, section: MultiObjective = SECTION, **session: Any) -> Front:
    found = build_front(section, FakeSession(RunDir(folder), **session))  # type: ignore[arg-type]
    assert found is not None
    return found


def written(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "front.json").read_text())
    return found


def test_means_and_standard_errors_by_hand(tmp_path: Path) -> None:
    """Right 1, 0, 1, 0 and lengths 2, 4, 6, 8; a failed answer of 100 tokens counts in neither."""
    mine = front(tmp_path)
    rows = [answer(1.0, 2), answer(0.0, 4), answer(1.0, 6), answer(0.0, 8)]
    mine.add(evaluation(*rows, answer(None, 100)), 5)
    (entry,) = written(tmp_path)["front"]
    assert entry["name"] == "step-000005" and entry["step"] == 5
    assert entry["means"] == {"right": 0.5, "length": 5.0}
    wanted = {"right": math.sqrt(1 / 3) / 2, "length": math.sqrt(20 / 3) / 2}
    assert entry["standard_errors"] == pytest.approx(wanted, rel=1e-12)
    assert measured(rows[0], "reward") == 2.0 and math.isnan(measured(rows[0], "absent"))


def test_only_what_nothing_dominates_stays_on_the_front(tmp_path: Path) -> None:
    mine = front(tmp_path)
    for step, right, length in ((0, 0.2, 5), (1, 0.5, 5), (2, 0.9, 9), (3, 0.4, 7), (4, 0.5, 5)):
        mine.add(evaluation(answer(right, length)), step)
    found = written(tmp_path)
    assert [entry["step"] for entry in found["front"]] == [1, 2], "shorter is better, so 3 loses to 1; 4 equals 1"
    assert [entry["step"] for entry in found["evaluated"]] == [0, 1, 2, 3, 4]
    assert found["evaluated"][0]["standard_errors"] is None, "one answer has no deviation"
    mine.add(evaluation(answer(0.1, 9)), 2)
    assert [entry["step"] for entry in written(tmp_path)["front"]] == [1], "an evaluation of the same step replaces it"
    mine.add(evaluation(answer(None, 1)), 5)
    assert len(written(tmp_path)["evaluated"]) == 5, "where the reward failed throughout, nothing was measured"


def test_archive_size_bounds_the_front_only(tmp_path: Path) -> None:
    mine = front(tmp_path, SECTION.model_copy(update={"archive_size": 2}))
    for step in range(1, 6):
        mine.add(evaluation(answer(float(step), step)), step)
    found = written(tmp_path)
    assert [entry["step"] for entry in found["front"]] == [1, 5] and len(found["evaluated"]) == 5


def test_kl_and_entropy_are_named_and_left_out(tmp_path: Path) -> None:
    objectives: dict[str, Any] = {**SECTION.model_dump()["objectives"], "kl": {"direction": "min"}}
    mine = front(tmp_path, MultiObjective.model_validate({"enabled": True, "objectives": objectives}))
    mine.add(evaluation(answer(1.0, 1)), 0)
    found = written(tmp_path)
    assert found["not_measured"] == ["kl"]
    assert found["objectives"] == [{"name": "right", "direction": "max"}, {"name": "length", "direction": "min"}]
    alone = MultiObjective.model_validate({"enabled": True, "objectives": {"kl": {"direction": "min"}}})
    session = FakeSession(RunDir(tmp_path))
    assert build_front(alone, session) is None  # type: ignore[arg-type]
    assert build_front(SECTION.model_copy(update={"enabled": False}), session) is None  # type: ignore[arg-type]


def test_it_goes_on_from_the_facts_of_a_checkpoint(tmp_path: Path) -> None:
    """What was written after the checkpoint is taken back, and the rest continues as if nothing had happened."""
    steps = [(0, 0.2, 5), (1, 0.5, 6), (2, 0.9, 9), (3, 0.6, 4)]
    whole = front(tmp_path)
    facts: dict[str, Any] = {}
    for step, right, length in steps:
        whole.add(evaluation(answer(right, length), answer(right, length + 1)), step)
        if step == 1:
            facts = json.loads(json.dumps(whole.session.facts))  # as a checkpoint keeps them
    end = written(tmp_path)
    again = front(tmp_path, facts=facts)
    assert [entry["step"] for entry in written(tmp_path)["evaluated"]] == [0, 1]
    for step, right, length in steps[2:]:
        again.add(evaluation(answer(right, length), answer(right, length + 1)), step)
    assert written(tmp_path) == end and again.session.facts == whole.session.facts


def test_the_first_rank_alone_writes(tmp_path: Path) -> None:
    mine = front(tmp_path, ranks=Ranks(1, 2))
    mine.add(evaluation(answer(1.0, 1)), 0)
    mine.draw()
    assert list(tmp_path.iterdir()) == [] and len(mine.archive) == 1


OBJECTIVES = "multi_objective.objectives={reward: {direction: max}, length: {direction: min}, kl: {direction: min}}"
MANY = ("multi_objective.enabled=true", OBJECTIVES, "eval_every=1", "save_every=1", "algo=grpo")


def test_a_run_writes_saves_and_draws_its_front(tmp_path: Path) -> None:
    """Before, after each of three steps, and after the last, which is the third once more."""
    run = tmp_path / "run"
    finished("rl", *ON_TASK, *MANY, "steps=3", f"run_dir={run}")
    found = written(run)
    assert [entry["step"] for entry in found["evaluated"]] == [0, 1, 2, 3]
    assert found["not_measured"] == ["kl"] and found["front"]
    for record, entry in zip(metrics(run)[-3:], found["evaluated"][1:], strict=True):
        assert entry["means"] == {"reward": record["eval/score"], "length": record["eval/length_mean"]}
    assert found["evaluated"][0]["means"]["reward"] == summary(run)["before"]["score"]
    assert summary(run)["paths"]["front"] == str(run / "front.json")
    assert (run / "figures" / "front.png").read_bytes().startswith(b"\x89PNG")
    saved = open_checkpoint(run / "checkpoints" / "latest").load()["facts"]["front"]
    assert [entry["step"] for entry in saved["evaluated"]] == [0, 1, 2, 3]

    going = tmp_path / "in two parts"
    finished("rl", *ON_TASK, *MANY, "steps=2", f"run_dir={going}")
    finished("rl", *ON_TASK, *MANY, "steps=3", f"run_dir={going}", "resume=auto")
    assert written(going) == found


def test_a_run_of_one_objective_has_no_front(tmp_path: Path) -> None:
    run = tmp_path / "run"
    finished("rl", *ON_TASK, f"run_dir={run}")
    assert not (run / "front.json").exists() and "front" not in summary(run)["paths"]


def test_a_reward_may_bear_the_name_of_a_measurement() -> None:
    item = answer(0.5, 3)
    assert measured(replace(item, rewards={"length": 7.0}), "length") == 7.0


def test_hypervolume_by_hand(tmp_path: Path) -> None:
    """Over the first evaluation, (0, 10 tokens): (1, 8) dominates 1 x 2; (0.5, 4) adds 0.5 x 4."""
    mine = front(tmp_path)
    assert mine.hypervolume() is None
    found = []
    for step, rows in enumerate([[(0, 10)], [(1, 8)], [(1, 4), (0, 4)], [(0, 9)]]):
        mine.add(evaluation(*(answer(float(right), tokens) for right, tokens in rows)), step)
        found.append(mine.hypervolume())
    assert found == [0.0, 2.0, 4.0, 4.0]
    assert written(tmp_path)["hypervolume"] == 4.0 and written(tmp_path)["reference"] == {"right": 0.0, "length": 10.0}


def test_hypervolume_over_a_reference_that_was_asked_for(tmp_path: Path) -> None:
    objectives = {
        "right": {"direction": "max", "reference": -1.0},
        "length": {"direction": "min", "reference": 12.0},
    }
    mine = front(tmp_path, MultiObjective.model_validate({"enabled": True, "objectives": objectives}))
    mine.add(evaluation(answer(0.0, 10)), 0)
    assert mine.hypervolume() == 2.0
    assert mine.archive.reference == (-1.0, -12.0)


def test_epsilon_and_prune_reach_the_archive(tmp_path: Path) -> None:
    objectives = {"right": {"direction": "max", "epsilon": 0.2}, "length": {"direction": "min", "epsilon": 1.0}}
    section = {"enabled": True, "objectives": objectives, "prune": "contribution", "archive_size": 3}
    mine = front(tmp_path, MultiObjective.model_validate(section))
    for step, tokens in enumerate((10, 9.0, 8)):
        mine.add(evaluation(answer(0.0, int(tokens))), step)
    assert [entry["step"] for entry in written(tmp_path)["front"]] == [2], "9 is no more than 1 better than 10"
    assert mine.archive.prune == "contribution" and mine.archive.epsilon == [0.2, 1.0]


def test_a_run_reports_its_hypervolume(tmp_path: Path) -> None:
    objectives = "multi_objective.objectives={reward: {direction: max}, length: {direction: min}}"
    finished(
        "rl", *ON_TASK, "multi_objective=true", objectives, "eval_every=1", "steps=2", f"run_dir={tmp_path / 'run'}"
    )
    said = [record["eval/hypervolume"] for record in metrics(tmp_path / "run") if "eval/hypervolume" in record]
    assert said == sorted(said) and len(said) >= 2 and said[0] >= 0.0
    assert summary(tmp_path / "run")["after"]["hypervolume"] == written(tmp_path / "run")["hypervolume"] >= said[-1]
