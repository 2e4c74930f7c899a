"""Settings of TRL and transformers that have no effect in NovaRL, or have an equivalent: they are accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from novarl.cli import main
from novarl.compose.weights import optim_settings
from novarl.config.base import Config
from novarl.config.flags import arguments
from novarl.config.foreign.rows import Ignored
from novarl.config.foreign.tables import rows
from novarl.config.load import load, to_dict
from novarl.config.names import rows_of
from novarl.config.tree import TREES, DPOConfig, RLConfig, RMConfig, SFTConfig
from novarl.core.errors import NovaError, NovaErrors
from tests.compose.harness import ON_TASK, events, finished

IGNORED = [(TREES[kind], row) for row in rows() if isinstance(row, Ignored) for kind in row.commands]
CEREMONY = {
    "logging_steps": "every step is logged",
    "remove_unused_columns": "every column of a row is kept",
    "gradient_accumulation_steps": "micro.max_tokens sets the size of micro-batches",
}
TRAINING = [RLConfig, SFTConfig, DPOConfig, RMConfig]


def given(tree: type[Config], *words: str) -> Any:
    return load(tree, overrides=["task=sort", *words])


def said(tree: type[Config], *words: str) -> str:
    with pytest.raises(NovaError) as caught:
        given(tree, *words)
    return str(caught.value)


@pytest.mark.parametrize(("tree", "row"), IGNORED, ids=lambda part: getattr(part, "old", None) or part.kind)
def test_an_ignored_name_changes_nothing_and_is_noted(tree: type[Config], row: Ignored) -> None:
    beside = {row.beside: 7} if row.beside else {}
    plain = load(tree, preset={"task": "sort", **beside})
    for value in (5, True, "text", "${a.b}"):
        config = load(tree, preset={"task": "sort", row.old: value, **beside})
        assert to_dict(config) == to_dict(plain)
        assert config.notes == (f"{row.old} is ignored: {row.reason}",)
    assert load(tree, preset={"task": "sort", row.old: None, **beside}).notes == plain.notes == ()


@pytest.mark.parametrize("tree", TRAINING, ids=lambda tree: tree.kind)
@pytest.mark.parametrize("name", CEREMONY)
def test_the_usual_settings_without_effect_are_ignored(name: str, tree: type[Config]) -> None:
    (row,) = rows_of(name, tree)
    assert isinstance(row, Ignored) and CEREMONY[name] in row.reason


def test_the_note_is_shown_by_explain_and_by_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note = "logging_steps is ignored: every step is logged to metrics.jsonl"
    assert main(["explain", "rl", "task=sort", "logging_steps=5"]) == 0
    assert f"Note: {note}.\n" in capsys.readouterr().out
    finished("rl", *ON_TASK, "warmup=0", "logging_steps=5", f"run_dir={tmp_path / 'run'}")
    assert note in [event["message"] for event in events(tmp_path / "run", "alert")]


@pytest.mark.parametrize("name", ["num_train_epochs", "num_epochs", "num_episodes", "trainer.total_epochs"])
def test_epochs_of_an_rl_run_are_ignored_only_if_its_steps_are_given(name: str) -> None:
    assert given(RLConfig, f"{name}=3", "max_steps=9").steps == 9
    for words in ((), ("max_steps=-1",)):
        assert f"{name}: steps sets the length of an RL run (set steps; " in said(RLConfig, f"{name}=3", *words)
    assert given(SFTConfig, "num_train_epochs=3").epochs == 3


def test_uploads_may_be_switched_off() -> None:
    for tree in TRAINING:
        assert given(tree, "push_to_hub=false") == given(tree)
        assert said(tree, "push_to_hub=true").endswith(
            "true is not supported: uploads are not supported (remove this key, or set push_to_hub=false)"
        )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["use_peft=true"], (16, 32.0)),
        (["use_peft=true", "lora_r=8"], (8, 32.0)),
        (["lora_alpha=4", "use_peft=true"], (16, 4.0)),
        (["use_peft=true", "lora.rank=0"], (0, 32.0)),
        (["use_peft=true", "lora_r=null", "lora_alpha=null"], (16, 32.0)),
        (["use_peft=false"], (0, 16.0)),
        (["use_peft=null"], (0, 16.0)),
        (["use_peft=null", "lora_r=8"], (8, 16.0)),
        (["use_peft=false", "lora_r=8", "lora_alpha=4", "lora_target_modules=q_proj"], (0, 16.0)),
        (["use_peft=true", "use_peft=false"], (0, 16.0)),
        (["lora_r=8", "lora_alpha=4"], (8, 4.0)),
    ],
)
@pytest.mark.parametrize("tree", TRAINING, ids=lambda tree: tree.kind)
def test_use_peft_trains_adapters_of_trls_size(
    tree: type[Config], words: list[str], expected: tuple[int, float]
) -> None:
    lora = given(tree, *words).lora
    assert (lora.rank, lora.alpha) == expected


def test_a_later_rank_overrides_use_peft_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "trl.yaml"
    file.write_text("task: sort\nuse_peft: false\nlora_r: 16\n")
    assert load(SFTConfig, file).lora.rank == 0
    assert load(SFTConfig, file, ["lora_r=4"]).lora.rank == 4
    assert load(SFTConfig, file, ["use_peft=true"]).lora.rank == 16
    assert "use_peft: must be true or false, got 3" in said(SFTConfig, "use_peft=3")


def test_use_peft_is_a_flag() -> None:
    assert arguments(["--use_peft", "a.yaml"], SFTConfig) == ("a.yaml", ["use_peft=true"])
    assert arguments(["--no-use-peft", "--lora_r", "8"], SFTConfig) == (None, ["use_peft=false", "lora_r=8"])


def test_layers_may_be_written_with_commas() -> None:
    for name in ("lora_target_modules", "target_modules", "actor.lora.target_modules", "ds.lora.target_modules"):
        assert given(SFTConfig, f"{name}=q_proj,v_proj").lora.target == ("q_proj", "v_proj")
        assert given(SFTConfig, f"{name}=q_proj").lora.target == ("q_proj",)
        assert given(SFTConfig, f"{name}=[q_proj, v_proj]").lora.target == ("q_proj", "v_proj")
        assert given(SFTConfig, f"{name}=all-linear").lora.target == "all-linear"
    assert "must be all-linear or list, got 3" in said(SFTConfig, "lora_target_modules=3")


@pytest.mark.parametrize(
    "name",
    ["warmup_ratio", "lr_warmup_ratio", "actor.scheduler.warmup_ratio", "optim.lr_warmup_steps_ratio"],
)
def test_the_warm_up_may_be_a_share_of_all_updates(name: str) -> None:
    optim = given(SFTConfig, f"{name}=0.1").optim
    assert optim.warmup_ratio == 0.1
    assert [optim_settings(optim, lr=1.0, total=total).warmup_steps for total in (1, 10, 25)] == [1, 1, 3]
    assert optim_settings(given(SFTConfig, "warmup_steps=4").optim, lr=1.0, total=25).warmup_steps == 4
    assert optim_settings(given(SFTConfig).optim, lr=1.0, total=25).warmup_steps == 0
    assert "at most 1.0, got 3" in said(SFTConfig, f"{name}=3")
    assert "both set the warm-up" in said(SFTConfig, f"{name}=0.1", "warmup_steps=4")
    assert given(SFTConfig, f"{name}=0.1", "warmup_steps=0").optim.warmup_ratio == 0.1


def test_a_whole_command_line_of_trls_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--learning_rate 1e-5 --num_train_epochs 1 --max_steps 20 --gradient_accumulation_steps 8 --logging_steps 2"
    words += " --push_to_hub false --remove_unused_columns false --run_name mine --use_peft --lora_r 16"
    words += " --lora_target_modules q_proj v_proj --warmup_ratio 0.1 --num_generations 8 --report_to none"
    assert main(["explain", "rl", "task=sort", *words.split()]) == 0
    told = capsys.readouterr().out
    assert "LoRA: only adapters of rank 16 (alpha 32) on the layers q_proj, v_proj are trained." in " ".join(
        told.split()
    )
    assert told.count("is ignored: ") == 4
    with pytest.raises(NovaErrors) as caught:
        given(RLConfig, "logging_steps=1", "push_to_hub=true", "fp16=true", "num_train_epochs=2")
    assert len(caught.value.each) == 3, "and what is refused beside it is said as before"
