"""`novarl dpo`: what it writes, how it resumes, and that every loss learns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from novarl.algos.preference_losses import LOSSES
from novarl.compose.preference_plan import decided, resolve_dpo
from novarl.config.load import load
from novarl.config.preference import DPOConfig
from novarl.core.errors import NovaError
from novarl.learn.scorer import Scorer
from novarl.observe.glossary import PREFERENCE
from tests.compose.harness import (
    QUIET,
    deterministic_metrics,
    events,
    finished,
    lightly,
    metrics,
    novarl,
    snapshot,
    summary,
    weights,
    write_rows,
)
from tests.compose.test_shipped import assert_explained

DPO = ("dpo", "batch_size=4", "steps=2", "eval.n=4", *QUIET)
LEARNING = ("optim.lr=1e-3", "batch_size=8", "steps=12", "save_every=null")
SHARED = {"robust": ("label_smoothing=0.1",)}
"""What a loss needs to be said."""


def preferences(count: int = 40) -> list[dict[str, Any]]:
    """The chosen answer is the question's letter twice, the rejected one twice the next letter."""
    letters = "abcdefghij"
    return [
        {"prompt": f"{i // 10}{letters[i % 10]}", "chosen": letters[i % 10] * 2, "rejected": letters[i % 10 - 1] * 2}
        for i in range(count)
    ]


def unpaired_rows() -> list[dict[str, Any]]:
    return [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in preferences()
        for side in ("chosen", "rejected")
    ]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with pairs and labelled answers in it."""
    write_rows(tmp_path / "pairs.jsonl", preferences())
    write_rows(tmp_path / "labelled.jsonl", unpaired_rows())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_configuration_names_every_loss_and_no_key_that_none_reads() -> None:
    assert set(LOSSES) == set(DPOConfig.model_fields["loss"].annotation.__args__)  # type: ignore[union-attr]
    for name, row in LOSSES.items():
        plan = resolve_dpo(load(DPOConfig, overrides=["data=x", f"loss={name}", *SHARED.get(name, ())]))
        assert plan.reference == row.reference and plan.options.keys() <= row.options, name
        keys = {"label_smoothing", "penalty", "gamma", "desirable_weight", "undesirable_weight"}
        for key in keys:
            overrides = ["data=x", f"loss={name}", f"{key}=0.25"]
            if key in row.options:
                assert resolve_dpo(load(DPOConfig, overrides=overrides)).options[key] == 0.25
            else:
                with pytest.raises(NovaError, match=f"loss={name} does not use it"):
                    load(DPOConfig, overrides=overrides)


def test_robust_without_a_share_of_wrong_labels_is_refused() -> None:
    with pytest.raises(NovaError, match=r"loss=robust needs the fraction of wrong labels"):
        load(DPOConfig, overrides=["data=x", "loss=robust"])


def test_what_a_loss_decides() -> None:
    assert decided(load(DPOConfig, overrides=["data=x"])) == {"optim.lr": 1e-4, "beta": 0.1}
    found = decided(load(DPOConfig, overrides=["data=x", "loss=simpo", "optim.lr=0.5"]))
    assert found == {"optim.lr": 0.5, "beta": 2.0, "gamma": 0.5}


def test_a_run_leaves_what_scripts_rely_on(folder: Path) -> None:
    finished(*DPO, "data=pairs.jsonl", "run_dir=run", "eval_every=1")
    found = summary(folder / "run")
    assert (found["status"], found["command"], found["loss"], found["steps"]) == ("done", "dpo", "sigmoid", 2)
    assert found["rows"] == {"read": 40, "used": 40, "truncated": 0, "refused": 0, "held_out": 4}
    for when in ("before", "after"):
        low, high = found[when]["interval"]
        assert low <= found[when]["score"] <= high and found[when]["n"] == 4
        assert {"auroc", "ece", "brier"} <= found[when].keys()
    assert found["before"]["score"] == 0.5, "a policy is no better than its own reference"
    assert {"run_dir", "metrics", "events", "samples", "checkpoints", "model"} <= found["paths"].keys()
    names = assert_explained(folder / "run")
    assert {"loss", "preference_accuracy", "reward_margin", "eval/score", "eval/auroc", "eval/ece"} <= names
    assert {name for name in PREFERENCE if name.startswith("eval/")} <= names, "the glossary has what is written"


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_learns_what_is_preferred(loss: str, folder: Path) -> None:
    finished(*DPO, "data=pairs.jsonl", "run_dir=run", f"loss={loss}", *SHARED.get(loss, ()), *LEARNING)
    records = metrics(folder / "run")
    gap = [record["reward_chosen_mean"] - record["reward_rejected_mean"] for record in records]
    assert gap[-1] > gap[0] + 1e-3, gap
    assert_explained(folder / "run")


def test_kto_takes_labelled_answers(folder: Path) -> None:
    finished(*DPO, "data=labelled.jsonl", "run_dir=run", "loss=kto")
    found = summary(folder / "run")
    assert found["rows"]["used"] == 80 and found["status"] == "done"
    assert {"kto_point"} <= assert_explained(folder / "run")


def test_strangers_answer_other_prompts_and_fit() -> None:
    """KTO's point of reference is estimated on them; the two sides of one row must not stand beside each other."""
    from novarl.compose.pair_rows import _fitted, _flat
    from novarl.data.pairs import Reading, load_labelled
    from novarl.data.sources import RawRow
    from novarl.learn.preference import unpaired
    from novarl.models.byte_tokenizer import ByteTokenizer

    tokenizer = ByteTokenizer()
    rows = [RawRow(i, f"f:{i}", row) for i, row in enumerate(preferences(6))]
    of_rows, _ = load_labelled(rows, Reading(tokenizer, 100))
    answers = _flat(of_rows)
    assert [row.label for row in answers] == [1.0] * 6 + [0.0] * 6
    for pair in unpaired(answers):
        own, number = tokenizer.decode(pair.chosen.tokens), int(pair.id.split(":")[1])
        beside = preferences(6)[number]
        stranger = tokenizer.decode(_fitted(pair, 100).rejected.tokens)
        assert stranger.startswith(f"<|user|>{beside['prompt']}<eos><|assistant|>"), own
        said = stranger.split("<|assistant|>")[1]
        assert said != f"{beside['chosen']}<eos>" or pair.margin == 0.0
        assert len(_fitted(pair, 6).rejected.tokens) == 6


def test_the_reference_is_computed_once_and_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resumed, the run reads it from its directory, and ends as if it had never stopped; sums are the model's own."""
    finished(*DPO, "data=pairs.jsonl", "run_dir=whole", "steps=4", "optim.lr=1e-3")
    finished(*DPO, "data=pairs.jsonl", "run_dir=run", "optim.lr=1e-3")
    kept = (folder / "run" / "reference" / "logprobs.safetensors").read_bytes()
    asked: list[int] = []
    plain = Scorer.logprobs
    monkeypatch.setattr(Scorer, "logprobs", lambda self, *given: asked.append(1) or plain(self, *given))
    finished(*DPO, "data=pairs.jsonl", "run_dir=run", "steps=4", "resume=auto", "optim.lr=1e-3")
    assert not asked and (folder / "run" / "reference" / "logprobs.safetensors").read_bytes() == kept
    one, two = weights(folder / "whole"), weights(folder / "run")
    assert all(torch.equal(one[name], two[name]) for name in one)
    hidden = ("time/", "memory_", "tokens_per_second")

    def curve(run: str) -> list[dict[str, Any]]:
        found = deterministic_metrics(folder / run)
        return [{name: value for name, value in row.items() if not name.startswith(hidden)} for row in found]

    assert curve("whole") == curve("run")
    stored = load_file(folder / "run" / "reference" / "logprobs.safetensors")["logprobs"]
    assert stored.numel() > 0 and bool((stored <= 0).all()) and bool((stored < 0).any())


@pytest.mark.parametrize("loss", ["simpo", "orpo"])
def test_a_loss_without_a_reference_computes_none(loss: str, folder: Path) -> None:
    finished(*DPO, "data=pairs.jsonl", "run_dir=run", f"loss={loss}")
    assert not (folder / "run" / "reference").exists()


@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_a_resumed_run_of_every_learner_ends_with_the_same_bits(loss: str, folder: Path) -> None:
    words = (*DPO, "data=pairs.jsonl", f"loss={loss}", "optim.lr=1e-3", "save_every=1")
    finished(*words, "run_dir=whole", "steps=3")
    finished(*words, "run_dir=run", "steps=1")
    finished(*words, "run_dir=run", "steps=3", "resume=auto")
    one, two = weights(folder / "whole"), weights(folder / "run")
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_kept_reference_that_is_not_of_these_rows_is_refused(folder: Path) -> None:
    finished(*DPO, "data=pairs.jsonl", "run_dir=run")
    words = (*DPO, "run_dir=run", "resume=auto", "steps=3")
    file = folder / "run" / "reference" / "logprobs.safetensors"
    write_rows(folder / "others.jsonl", [{**row, "chosen": f"{row['chosen']}!"} for row in preferences()])
    before = {name: value for name, value in snapshot(folder / "run").items() if not name.startswith("reference")}
    for arrange, data, said in (
        (lambda: None, "others.jsonl", "the rows have changed"),
        (lambda: file.write_bytes(file.read_bytes()[:50]), "pairs.jsonl", "cannot be read"),
        (lambda: save_file({"other": torch.zeros(1)}, file), "pairs.jsonl", "does not contain tensor"),
        (lambda: file.unlink(), "pairs.jsonl", "are missing"),
    ):
        arrange()
        ended = novarl(*words, f"data={data}")
        assert ended.code == 2 and said in ended.err and ended.err.count("\n") == 1, ended.err
    after = {name: value for name, value in snapshot(folder / "run").items() if not name.startswith("reference")}
    assert after == before


def test_micro_batches_change_only_rounding(folder: Path) -> None:
    words = (*DPO, "data=pairs.jsonl", "optim.eps=1e-3", "optim.lr=1e-3")
    finished(*words, "run_dir=one")
    finished(*words, "run_dir=many", "micro.max_tokens=20")
    one, many = weights(folder / "one"), weights(folder / "many")
    assert max(float((one[name] - many[name]).abs().max()) for name in one) < 2e-6
    moved = {name: value for name, value in one.items() if value.ndim == 2}
    assert moved


def test_bad_rows_are_events(folder: Path) -> None:
    bad = {"prompt": "q", "chosen": "a", "rejected": "a"}
    write_rows(folder / "some.jsonl", [*preferences(), bad])
    finished(*DPO, "data=some.jsonl", "run_dir=run", "max_bad_rows=0.1")
    assert summary(folder / "run")["rows"]["refused"] == 1
    (event,) = events(folder / "run", "bad_row")
    assert (event["where"], event["field"], event["reason"]) == ("some.jsonl:41", "rejected", "is equal to chosen")


def test_a_task_makes_pairs_of_its_demonstrations(folder: Path) -> None:
    finished(*DPO, "task=sort", "run_dir=run")
    assert summary(folder / "run")["task"] == "sort"
    assert summary(folder / "run")["rows"]["refused"] == 0


def test_held_out_rows_of_their_own(folder: Path) -> None:
    write_rows(folder / "held_out.jsonl", preferences(7))
    finished(*DPO, "data=pairs.jsonl", "eval.data=held_out.jsonl", "run_dir=run")
    assert summary(folder / "run")["rows"]["held_out"] == 4


def test_ctrl_c_saves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os
    import signal

    from novarl.learn.preference import PreferenceLearner

    update = PreferenceLearner.update

    def interrupted(self: PreferenceLearner, batch: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return update(self, batch)

    with lightly(), monkeypatch.context() as patch:
        patch.setattr(PreferenceLearner, "update", interrupted)
        assert novarl(*DPO, "data=pairs.jsonl", "run_dir=run").code == 130
    assert json.loads((folder / "run" / "summary.json").read_text())["status"] == "stopped"
    finished(*DPO, "data=pairs.jsonl", "run_dir=run", "resume=auto")
    assert summary(folder / "run")["steps"] == 2


def test_what_takes_long_before_the_first_step_is_said(folder: Path) -> None:
    def said(run: str) -> list[str]:
        return [event["message"] for event in events(folder / run, "alert") if "reference" in event["message"]]

    finished(*DPO, "data=pairs.jsonl", "steps=1", "run_dir=run")
    assert said("run") == ["Computing the reference's log-probabilities of all 40 rows, once for the whole run"]
    finished(*DPO, "data=pairs.jsonl", "steps=2", "run_dir=run", "resume=auto")
    assert len(said("run")) == 1, "they are read where a run goes on"
    finished(*DPO, "data=pairs.jsonl", "steps=1", "loss=simpo", "run_dir=other")
    assert not said("other"), "there is no reference"
