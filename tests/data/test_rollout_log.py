"""The rollout log of real runs, as its readers see it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean

import pytest
from tokenizers import Tokenizer as Fast, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import novarl
from novarl.core.errors import NovaError
from novarl.data.rollout_log import piece
from novarl.models.byte_tokenizer import ByteTokenizer
from novarl.observe.rollouts import RolloutRow

BASE = {
    "task": "sort",
    "model": "tiny",
    "warmup": 60,
    "steps": 3,
    "prompts_per_rollout": 4,
    "responses_per_prompt": 4,
    "eval": {"n": 4},
    "threads": 1,
    "log": {"console": False, "tensorboard": False},
}


def run(folder: Path, **settings: object) -> novarl.LoadedRun:
    log = {**BASE["log"], **settings.pop("log", {})}  # type: ignore[dict-item]
    novarl.RL(**{**BASE, **settings, "log": log, "run_dir": str(folder)}).run()
    return novarl.load_run(folder)


def tokens_of(rows: list[RolloutRow], name: str) -> list[float]:
    return [value for row in rows for value in getattr(row, name)]


@pytest.mark.parametrize("updates", [1, 2])
def test_token_columns_agree_with_the_metrics(tmp_path: Path, updates: int) -> None:
    found = run(tmp_path / "run", algo="grpo", kl={"coef": 0.1}, entropy={"coef": 0.01}, updates_per_rollout=updates)
    assert found.steps() == [1, 2, 3]
    for step in found.steps():
        rows = list(found.rollouts(step))
        records = [record for record in found.metrics if record["phase"] == "rl" and record["step"] == step]
        assert len(records) == updates
        assert len({row.reward for row in rows}) > 1 or step > 1  # otherwise every loss term could be 0
        assert math.fsum(tokens_of(rows, "loss")) == pytest.approx(sum(r["total_loss"] for r in records), abs=1e-6)
        if updates == 1:
            entropy, mismatch = records[0]["entropy"], records[0]["mismatch_max"]
            assert fmean(tokens_of(rows, "entropy")) == pytest.approx(entropy, abs=1e-5)
            gaps = [abs(a - b) for row in rows for a, b in zip(row.old_logp, row.behavior_logp, strict=True)]
            assert max(gaps) == pytest.approx(mismatch, abs=1e-7)
        for row in rows:
            ended = "<eos>" if row.finish_reason == "stop" else ""
            assert "".join(row.pieces) == row.text + ended
            assert set(row.turns) == {0}
            columns = ("pieces", "turns", "logp", "old_logp", "ref_logp", "entropy", "loss", "advantages")
            assert {len(getattr(row, name)) for name in columns} == {len(row.tokens)}


def test_logging_rollouts_changes_no_weight(tmp_path: Path) -> None:
    for name, every in (("on", 1), ("off", None)):
        run(tmp_path / name, updates_per_rollout=2, log={"rollouts_every": every})
    weights = [
        (tmp_path / name / "checkpoints/latest/model/model.safetensors").read_bytes() for name in ("on", "off", "on")
    ]
    assert weights[0] == weights[1]
    assert not (tmp_path / "off" / "rollouts").exists()


def test_above_the_limit_one_step_in_ten_is_logged(tmp_path: Path) -> None:
    found = run(tmp_path / "run", steps=11, log={"rollouts_gb": 1e-6})
    assert found.steps() == [1, 10]
    said = [
        event["message"] for event in found.events if event["kind"] == "alert" and "rollouts_gb" in event["message"]
    ]
    assert len(said) == 1


def test_a_resumed_run_writes_the_same_log(tmp_path: Path) -> None:
    whole = {"steps": 4, "updates_per_rollout": 2, "save_every": 1}
    run(tmp_path / "whole", **whole)
    with novarl.RL(**{**BASE, **whole, "run_dir": str(tmp_path / "cut")}) as trainer:
        for number, _ in enumerate(trainer, start=1):
            if number == 5:  # in the middle of step 3
                break
    run(tmp_path / "cut", **whole, resume="auto")
    files = sorted(path.name for path in (tmp_path / "whole/rollouts").iterdir())
    assert len(files) == 12
    assert files == sorted(path.name for path in (tmp_path / "cut/rollouts").iterdir())
    for name in files:
        assert (tmp_path / "whole/rollouts" / name).read_bytes() == (tmp_path / "cut/rollouts" / name).read_bytes(), (
            name
        )


def test_a_damaged_batch_is_named(tmp_path: Path) -> None:
    found = run(tmp_path / "run", steps=1)
    file = tmp_path / "run/rollouts/step-000001.safetensors"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(NovaError, match=r"step-000001\.safetensors"):
        found.rollouts(1)


def test_pieces_keep_spaces_and_parts_of_characters() -> None:
    text = "über 猫!"
    ours = ByteTokenizer()
    assert [piece(ours, token) for token in ours.encode("aü")] == ["a", [0xC3], [0xBC]]

    byte_level = Fast(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=byte_level)
    pieces = [piece(fast, token) for token in fast.encode(text)]
    assert [0xC3] in pieces and " " in pieces
    assert b"".join(bytes(item) if isinstance(item, list) else item.encode() for item in pieces).decode() == text

    words = Fast(models.WordLevel(vocab={"\u2581the": 0, "\u2581cat": 1, "<0xC3>": 2, "<unk>": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    words.decoder = decoders.Metaspace()
    spaced = PreTrainedTokenizerFast(tokenizer_object=words)
    assert [piece(spaced, token) for token in (0, 1, 2)] == [" the", " cat", [0xC3]]


def test_lines_of_another_writer(tmp_path: Path) -> None:
    from novarl.observe.writer import RunWriter

    row = {"prompt": "2+2=", "text": "4", "reward": 1.0, "columns": {"pieces": ["4"], "advantages": [0.5]}}
    with RunWriter(tmp_path / "run", writer="mine 1") as writer:
        writer.step(1, {"reward_mean": 1.0})
        writer.rollouts(1, [row])
        for wrong in ({"advantage": [0.5]}, {"pieces": ["4"], "advantages": []}):
            with pytest.raises(NovaError, match="column"):
                writer.rollouts(2, [{**row, "columns": wrong}])
    found = novarl.load_run(tmp_path / "run")
    assert found.summary == {"status": "done", "steps": 1}
    (answer,) = found.rollouts(1)
    assert (answer.prompt, answer.pieces, answer.advantages, answer.logp) == ("2+2=", ("4",), (0.5,), ())


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"format": 2}))
    with pytest.raises(NovaError, match="format 2"):
        novarl.load_run(tmp_path)


def test_alerts_of_another_writer(tmp_path: Path) -> None:
    from novarl.observe.writer import RunWriter

    for name, worst in (("healthy", 0.002), ("broken", 5.0)):
        with RunWriter(tmp_path / name, writer="mine 1") as writer:
            for step in range(1, 21):
                writer.step(step, {"reward_mean": 0.5, "kl": worst if step == 12 else 0.002, "entropy": 1.0})
    raised = {
        name: [(event["step"], event["alert"]) for event in novarl.load_run(tmp_path / name).events if "alert" in event]
        for name in ("healthy", "broken")
    }
    assert raised == {"healthy": [], "broken": [(12, "kl_explosion")]}
