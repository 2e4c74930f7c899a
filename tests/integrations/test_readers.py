"""`novarl import`: files as other libraries write them, written here, become run directories."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import novarl
from novarl.cli import main
from tests.integrations.payload import Payload

LOG = {
    "loss": 0.1,
    "reward": 0.75,
    "reward_std": 0.5,
    "kl": 0.01,
    "completions/mean_length": 4.0,
    "rewards/good/mean": 0.5,
    "rewards/short/mean": 0.25,
    "epoch": 0.1,
    "step": 1,
}


def lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def imported(tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: object) -> tuple[novarl.LoadedRun, str]:
    """The run of an import, and what the command printed."""
    source, *options = map(str, words)
    assert main(["import", source, str(tmp_path / "out"), *options]) == 0, capsys.readouterr().err
    return novarl.load_run(tmp_path / "out"), capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line of a refusal."""
    assert main(["import", *map(str, words)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


# TRL


def trl_output(folder: Path, *, log: Mapping[str, Any] | None = LOG, step: int = 1) -> Path:
    table = {
        "step": [step] * 4,
        "prompt": ["p", "p", "q", "q"],
        "completion": ["a", "b", "c", "d"],
        "good": [1.0, 0.0, 1.0, 0.0],
        "short": [0.25, None, 0.5, 0.25],
        "words": [1, 2, 3, 4],
        "advantage": [1.0, -1.0, 1.0, -1.0],
    }
    (folder / "completions").mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(table), folder / "completions" / f"completions_{step:05d}.parquet")
    if log is not None:
        save_state(folder / "checkpoint-2", [log, {"eval_reward": 0.5, "eval_runtime": 2.0, "step": 1}])
    return folder


def save_state(folder: Path, logs: list[Mapping[str, Any]], **more: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    state = {"global_step": 2, "max_steps": 4, "log_history": logs, **more}
    (folder / "trainer_state.json").write_text(json.dumps(state))


def test_trl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, shown = imported(tmp_path, capsys, trl_output(tmp_path / "out-trl"))
    rows = run.rollouts(1)
    assert [row.text for row in rows] == ["a", "b", "c", "d"] and [row.group for row in rows] == [0, 0, 1, 1]
    assert rows[0].rewards == {"good": 1.0, "short": 0.25} and rows[1].rewards["short"] is None
    assert [row.reward for row in rows] == [1.25, 0.0, 1.5, 0.25], "the logged mean shows that all weights are 1"
    assert rows[2].extra == {"words": 3, "advantage": 1.0} and rows[0].tokens == ()
    (row,) = run.metrics
    assert row["reward_mean"] == 0.75 and row["total_loss"] == 0.1 and row["trl/kl"] == 0.01
    assert row["eval_reward"] == 0.5 and row["time/eval_runtime"] == 2.0 and row["rewards/good_mean"] == 0.5
    assert "reward -> reward_mean" in shown and "kept under `extra` of each answer: advantage, words" in shown
    assert "absent:  tokens and log-probabilities" in shown and "whether GRPO or RLOO" in shown
    assert run.manifest["writer"] == "trl" and run.manifest["imported"]["absent"]


def test_trl_with_weights_that_are_not_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, shown = imported(tmp_path, capsys, trl_output(tmp_path / "x", log=LOG | {"reward": 3.0}))
    assert [row.reward for row in run.rollouts(1)] == [None] * 4 and "weights of the rewards are not recorded" in shown


def test_trl_answers_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trl_output(tmp_path / "x", log=None)
    run, shown = imported(tmp_path, capsys, folder / "completions" / "completions_00001.parquet")
    assert run.rollouts(1)[0].rewards == {"good": 1.0, "short": 0.25, "words": 1.0}
    assert "absent:  metrics" in shown and "taken as rewards, because numeric: good, short, words" in shown
    assert run.metrics[0]["episodes"] == 4.0 and "total_loss" not in run.metrics[0]


def test_trl_metrics_alone_from_the_newest_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = [{"loss": 3.0, "mean_token_accuracy": 0.5, "step": 1}, {"train_loss": 3.0, "train_runtime": 1.0, "step": 1}]
    save_state(tmp_path / "x" / "checkpoint-2", [])
    save_state(tmp_path / "x" / "checkpoint-10", logs)
    run, shown = imported(tmp_path, capsys, tmp_path / "x")
    assert run.metrics.series("loss") == [3.0] and run.metrics.series("accuracy") == [0.5]
    assert run.manifest["kind"] == "sft" and run.steps() == [] and (run.summary or {})["totals"]["train_loss"] == 3.0
    assert "completions" not in shown, "supervised training has no answers"


@pytest.mark.parametrize(
    ("log", "name", "kind", "said"),
    [
        ({"loss": 1.0, "rewards/accuracies": 0.5}, "loss", "dpo", "absent"),
        ({"loss": 1.0, "margin": 0.5, "accuracy": 1.0}, "preference_accuracy", "rm", "absent"),
        ({"loss": 1.0, "rewards/chosen": 0.5}, "trl/loss", "dpo", "absent"),
        ({"loss": 1.0, "mean_token_accuracy": 0.5}, "loss", "sft", "loss is taken as the cross-entropy"),
        ({"loss": 1.0}, "trl/loss", "sft", "which trainer wrote it is not recorded"),
    ],
)
def test_trainers_are_told_apart(
    log: dict[str, float], name: str, kind: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_state(tmp_path / "x", [log | {"step": 1}])
    run, shown = imported(tmp_path, capsys, tmp_path / "x")
    assert run.metrics[0][name] == 1.0 and run.manifest["kind"] == kind and said in shown


def test_trl_conversations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [[{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]]
    table = {"step": [1], "prompt": asked, "completion": [[{"role": "assistant", "content": "a"}]], "advantage": [0.0]}
    pq.write_table(pa.table(table), tmp_path / "completions_00001.parquet")
    run, _ = imported(tmp_path, capsys, tmp_path / "completions_00001.parquet")
    (row,) = run.rollouts(1)
    assert (row.prompt, row.text) == ("u", "a") and [one["role"] for one in row.messages][1:] == ["user", "assistant"]


def test_trl_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1 and nothing more")
    assert "cannot be read" in refused(capsys, tmp_path / "x.parquet")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 1}')
    assert "not a state of a trainer" in refused(capsys, tmp_path / "trainer_state.json")


# verl


def verl_row(text: str, score: object, **more: Any) -> dict[str, Any]:
    return {"input": f"ask {text[0]}", "output": text, "gts": "42", "score": score, "step": 3, "acc": 1.0, **more}


def test_verl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [verl_row("a1", 1.0), verl_row("b1", 0.0), verl_row("a2", 0.0, pred="41")]
    lines(tmp_path / "dump" / "3.jsonl", rows)
    lines(tmp_path / "dump" / "10.jsonl", [verl_row("a", 1.0, step=10)])
    run, shown = imported(tmp_path, capsys, tmp_path / "dump")
    assert run.steps() == [3, 10]
    found = run.rollouts(3)
    assert [(row.group, row.index, row.text) for row in found] == [(0, 0, "a1"), (1, 0, "b1"), (0, 1, "a2")]
    assert [row.reward for row in found] == [1.0, 0.0, 0.0] and found[2].extra == {"acc": 1.0, "pred": "41"}
    assert found[0].answer == "42" and run.metrics[0]["reward_raw_mean"] == pytest.approx(1 / 3)
    assert "2 JSONL files: 4 answers, steps 3 to 10" in shown and "acc, pred" in shown


def test_verl_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = lines(tmp_path / "3.jsonl", [verl_row("a", 1.0), verl_row("b", "high")])
    assert "3.jsonl:2 score: 'high' is not a number" in refused(capsys, file, tmp_path / "out")
    file.write_text(json.dumps(verl_row("a", 1.0)) + "\nnot json\n")
    assert "3.jsonl:2: not JSON" in refused(capsys, file, tmp_path / "out")
    assert not (tmp_path / "out").exists(), "a refusal leaves nothing behind"


# slime


def slime_sample(place: int, **more: Any) -> dict[str, Any]:
    return {
        "group_index": place // 2,
        "index": place,
        "prompt": "p",
        "tokens": [7, 8, 1, 2, 3],
        "response": f"r{place}",
        "response_length": 3,
        "label": "42",
        "reward": float(place),
        "loss_mask": [1, 0, 1],
        "rollout_log_probs": [-0.1, -0.2, -0.3],
        "status": "completed",
        "metadata": {},
        "weight_versions": ["5"],
        **more,
    }


def test_slime(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = [slime_sample(place) for place in range(3)] + [slime_sample(3, status="truncated", loss_mask=None)]
    torch.save({"rollout_id": 5, "samples": samples}, tmp_path / "5.pt")
    torch.save({"rollout_id": 5, "samples": samples}, tmp_path / "eval_5.pt")
    run, shown = imported(tmp_path, capsys, tmp_path)
    rows = run.rollouts(5)
    assert [(row.group, row.index) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert rows[0].tokens == (1, 3) and rows[0].behavior_logp == (-0.1, -0.3) and rows[3].tokens == (1, 2, 3)
    assert [row.status for row in rows] == ["done"] * 3 + ["truncated"] and rows[1].reward == 1.0
    assert rows[0].extra == {"weight_versions": ["5"]} and "not read: 1 file of evaluations" in shown


def test_slime_runs_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Payload.ran.clear()
    torch.save({"rollout_id": 5, "samples": [Payload()]}, tmp_path / "5.pt")
    assert "would run code from the file" in refused(capsys, tmp_path / "5.pt") and not Payload.ran
    torch.load(tmp_path / "5.pt", weights_only=False)
    assert Payload.ran, "the payload is one that would have run"


def test_slime_named_rewards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample = slime_sample(0, reward={"acc": 1.0, "why": "same"}, status="aborted")
    torch.save({"rollout_id": 0, "samples": [sample]}, tmp_path / "0.pt")
    run, shown = imported(tmp_path, capsys, tmp_path / "0.pt")
    (row,) = run.rollouts(0)
    assert row.reward is None and row.rewards == {"acc": 1.0} and "the rewards are named" in shown
    assert row.status == "failed" and row.error == "slime's status is aborted"
    (tmp_path / "bad.pt").write_bytes((tmp_path / "0.pt").read_bytes()[:-40])
    assert refused(capsys, tmp_path / "bad.pt")


# verifiers


def verifiers_row(example: int, **more: Any) -> dict[str, Any]:
    return {
        "example_id": example,
        "prompt": [{"role": "user", "content": f"q{example}"}],
        "completion": [{"role": "assistant", "content": "a", "tool_calls": None}, {"role": "tool", "content": "t"}],
        "answer": "42",
        "reward": 0.5,
        "metrics": {"correct": 0.5, "num_turns": 1.0},
        "correct": 0.5,
        "num_turns": 1.0,
        "is_completed": True,
        "is_truncated": False,
        "info": {"level": 2},
        **more,
    }


def test_verifiers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [verifiers_row(0), verifiers_row(1, is_truncated=True), verifiers_row(0, error={"error": "Timeout"})]
    lines(tmp_path / "eval" / "results.jsonl", rows)
    (tmp_path / "eval" / "metadata.json").write_text('{"model": "m", "api_key": "secret", "avg_reward": 0.5}')
    run, shown = imported(tmp_path, capsys, tmp_path / "eval")
    found = run.rollouts(1)
    assert [(row.group, row.index) for row in found] == [(0, 0), (1, 0), (0, 1)] and found[1].status == "truncated"
    assert found[0].rewards == {"correct": 0.5, "num_turns": 1.0} and found[0].text == "a"
    assert found[0].extra == {"is_completed": True, "info": {"level": 2}}, "metrics are not kept twice"
    assert found[2].status == "failed" and "Timeout" in (found[2].error or "")
    assert run.config == {"model": "m", "avg_reward": 0.5} and "an evaluation has none" in shown


def test_verifiers_traces_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines(tmp_path / "traces.jsonl", [{"version": 1, "nodes": []}])
    assert "traces.jsonl of verifiers v1 is not supported" in refused(capsys, tmp_path)


# trackio


def project(path: Path, runs: Mapping[str, list[tuple[int, str]]]) -> Path:
    with sqlite3.connect(path) as database:
        database.execute(
            "CREATE TABLE metrics (id INTEGER PRIMARY KEY, run_id TEXT, timestamp TEXT, run_name TEXT, step INTEGER, "
            "metrics TEXT)"
        )
        database.execute("CREATE TABLE configs (id INTEGER PRIMARY KEY, run_id TEXT, run_name TEXT, config TEXT)")
        database.execute("CREATE TABLE traces (id TEXT, run_name TEXT, messages TEXT)")
        for name, logged in runs.items():
            database.execute(
                "INSERT INTO configs VALUES (NULL, ?, ?, ?)", (name, name, '{"lr": 0.1, "hub_token": "x"}')
            )
            database.execute("INSERT INTO traces VALUES (?, ?, ?)", (name, name, "[]"))
            for step, text in logged:
                row = (name, "2026-11-27", name, step, text)
                database.execute("INSERT INTO metrics VALUES (NULL, ?, ?, ?, ?, ?)", row)
    database.close()
    return path


LOGGED = [
    (1, '{"train/reward": 0.5, "train/completions/mean_length": 3.0, "train/loss": "NaN"}'),
    (1, '{"eval/reward": 0.25}'),
    (2, '{"train/reward": 0.75, "completions": {"_type": "trackio.table"}}'),
    (2, '{"train/reward": 1.0}'),
]


def test_trackio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = project(tmp_path / "p.db", {"one": LOGGED})
    before = file.read_bytes()
    run, shown = imported(tmp_path, capsys, file)
    first, second = run.metrics
    assert first["reward_mean"] == 0.5 and first["length_mean"] == 3.0 and first["eval_reward"] == 0.25
    assert first["total_loss"] != first["total_loss"], "NaN is kept"
    assert second["reward_mean"] == 1.0 and "1 value logged again" in shown
    assert "not read, because not a number: completions" in shown and "not read: traces (1)" in shown
    assert run.config == {"lr": 0.1} and file.read_bytes() == before and len(list(tmp_path.glob("p.db*"))) == 1


def test_trackio_with_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = project(tmp_path / "p.db", {"one": LOGGED, "two": [(7, '{"x": 1}')]})
    assert "2 runs (add run=NAME, one of one, two)" in refused(capsys, file)
    assert "there is no run 'tow' (did you mean two?)" in refused(capsys, file, "run=tow")
    assert "unknown option" in refused(capsys, file, "prompt=x")
    run, _ = imported(tmp_path, capsys, file, "run=two")
    assert [row["step"] for row in run.metrics] == [7] and run.metrics[0]["x"] == 1.0


def test_damaged_and_other_databases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = project(tmp_path / "p.db", {"one": LOGGED})
    whole = file.read_bytes()
    file.write_bytes(whole[:100] + b"\xff" * (len(whole) - 100))
    assert "the database cannot be read" in refused(capsys, file)
    project(tmp_path / "q.db", {"one": [(1, "no json")]})
    assert "metrics.id=1: not JSON" in refused(capsys, tmp_path / "q.db")
    with sqlite3.connect(tmp_path / "other.db") as database:
        database.execute("CREATE TABLE other (id INTEGER)")
    database.close()
    assert "unknown format" in refused(capsys, tmp_path / "other.db")


# Any JSONL file


ROWS = [
    {"question": "q", "said": "a", "score": 1, "iteration": 2, "note": "n"},
    {"question": "q", "said": "b", "score": None, "iteration": 2, "note": "m"},
    {"question": "r", "said": "c", "score": 0.5, "iteration": 1, "note": "o"},
]
MAPPING = ("prompt=question", "text=said", "reward=score", "step=iteration")


def test_a_mapping(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, shown = imported(tmp_path, capsys, lines(tmp_path / "rows.jsonl", ROWS), *MAPPING)
    assert run.steps() == [1, 2]
    rows = run.rollouts(2)
    assert [(row.prompt, row.text, row.reward, row.index) for row in rows] == [("q", "a", 1.0, 0), ("q", "b", None, 1)]
    assert rows[0].extra == {"note": "n"} and "absent:  answer" in shown and "extra" in shown


def test_columns_with_our_names_need_no_mapping(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = lines(tmp_path / "rows.jsonl", [{"prompt": "p", "text": "t", "reward": 1.0, "more": 2}])
    run, shown = imported(tmp_path, capsys, file)
    assert run.rollouts(1)[0].extra == {"more": 2} and "step: all answers are of step 1" in shown


def test_messages_as_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [{"role": "user", "content": "q"}]
    file = lines(tmp_path / "rows.jsonl", [{"m": asked, "a": "said"}])
    run, _ = imported(tmp_path, capsys, file, "prompt=m", "text=a")
    (row,) = run.rollouts(1)
    assert row.prompt == "q" and row.messages == [*asked, {"role": "assistant", "content": "said"}]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("prompt=question",), "the mapping needs prompt (or messages) and text"),
        (("prompt=query", "text=said"), "no column 'query' (its columns are iteration, note, question, said, score)"),
        (("prompt=question", "txt=said"), "unknown field 'txt' (did you mean text?)"),
        (("prompt=question", "text=said", "reward=note"), "rows.jsonl:1 note: 'n' is not a number"),
        (("prompt=question", "text=said", "step=note"), "rows.jsonl:1 note: 'n' is not a number"),
        (("prompt=question", "text=said", "messages=note"), "not a list of messages"),
        ((), "unknown format with the columns question, said, score, iteration, note"),
    ],
)
def test_mistakes(options: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(capsys, lines(tmp_path / "rows.jsonl", ROWS), tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


# The command


def test_unknown_and_missing_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such file or directory" in refused(capsys, tmp_path / "none")
    (tmp_path / "x.txt").write_text("words")
    assert "unknown format (known: TRL" in refused(capsys, tmp_path / "x.txt")
    (tmp_path / "empty.jsonl").touch()
    assert "unknown format" in refused(capsys, tmp_path / "empty.jsonl")
    (tmp_path / "folder").mkdir()
    assert "unknown format" in refused(capsys, tmp_path / "folder")
    assert "gives no source" in refused(capsys)
    assert "does not take" in refused(capsys, "a", "b", "c") and "does not take" in refused(capsys, "a", "--out=b")


def test_a_directory_that_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = lines(tmp_path / "rows.jsonl", ROWS)
    assert main(["import", str(file), *MAPPING]) == 0
    assert "runs/rows" in capsys.readouterr().out and (tmp_path / "runs" / "rows" / "manifest.json").is_file()
    said = refused(capsys, file, *MAPPING)
    assert "runs/rows: the directory already holds a run (give another directory" in said
    assert "already a run directory" in refused(capsys, "runs/rows")


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "--help"]) == 0
    assert "novarl import SOURCE [OUT] [field=column ...]" in capsys.readouterr().out
