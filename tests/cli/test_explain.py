"""`novarl explain`: the arithmetic of a run in words, with what the algorithm and the task decide filled in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from novarl import cli
from novarl.algos.named import ALGORITHMS
from novarl.config.describe import describe
from novarl.config.load import load
from novarl.config.tree import EvalConfig, RLConfig, SampleConfig, SFTConfig
from tests.compose.harness import ON_TASK, finished


def unwrapped(text: str) -> str:
    """The output with each of its sentences on one line; they are wrapped at 80 columns."""
    words, gap, values = text.partition("\n\n")
    assert max(map(len, words.splitlines())) <= 80 or "/" in words
    return words.replace("\n  ", " ") + gap + values


ROOT = Path(__file__).parents[2]
SFT = "kind is 'sft', but the command is novarl explain"
CONFIGS = sorted(file for file in (ROOT / "configs").iterdir() if file.is_file())


def test_the_arithmetic_of_a_step_and_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    words = "task=sort steps=20 prompts_per_rollout=6 responses_per_prompt=4 updates_per_rollout=8 epochs_per_rollout=2"
    assert cli.main(["explain", *words.split(" "), "algo=ppo_clip", "rollout.max_tokens=32", "run_dir=runs/mine"]) == 0
    said = unwrapped(capsys.readouterr().out)
    assert "6 prompts x 4 responses = 24 trajectories of at most 32 tokens (at most 768 sampled tokens)" in said
    assert "8 optimizer updates per step over 2 epochs, 6 trajectories per update" in said
    assert "Total: 20 steps, 480 trajectories, at most 15,360 sampled tokens, 160 optimizer updates." in said
    assert "Output in runs/mine: " in said


def test_what_the_algorithm_decides_is_filled_in(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(["explain", "task=sort", "algo=grpo", "kl.coef=0.04", "kl.type=loss", "responses_per_prompt=4"]) == 0
    )
    said = unwrapped(capsys.readouterr().out)
    assert "reward minus the group mean, divided by the group standard deviation" in said
    assert "0.04 x KL (k3) in the loss" in said and "ratios clipped to [1 - 0.2, 1 + 0.2]" in said
    assert "\n  agg: sequence\n" in said and "\n  lr: null\n" not in said and "\n  estimator: group\n" in said


PARTS = {
    "algo=ppo": (
        "GAE over the tokens of an answer, gamma 1, lambda 0.95; normalized over all tokens",
        "a separate critic, learning rate 0.001, 4 updates per step",
        "0.01 x KL (k1) in the reward; reference: the initial policy",
    ),
    "algo=ppo critic.shared=true critic.clip=0.2": (
        "a critic that shares the policy's trunk, loss weight 0.1, value clip 0.2",
    ),
    "algo=ppo critic.warmup_steps=5": ("only the critic is trained in the first 5 steps",),
    "algo=vineppo vine.samples=4": ("the mean reward of 4 continuations", "every token is a step"),
    "task=arithmetic algo=vineppo": ("a step ends with ' '",),
    "algo=prime": ("0.05 x (log model - log reference)", "correct if the reward is at least 0.5", "learning rate"),
    "algo=ppo adv.estimator=vtrace": ("V-trace over the tokens",),
    "correction.tis_max=3": ("each token's loss is weighted by pi_old / mu, truncated at 3",),
    "correction.type=sequence": ("each answer's loss is weighted by its pi_old / mu, truncated at 2",),
    "correction.type=icepop": ("tokens with pi_old / mu outside [0.5, 5] are masked",),
    "entropy.target=0.5": ("the weight adapts from 0.01 to keep the entropy at 0.5 nats per token (rate 0.05)",),
    "correction.type=sequence correction.geometric=true": ("using the geometric mean of the token ratios",),
    "algo=ppo adv.estimator=clipped_is adv.is_level=trajectory": ("returns per answer over the tokens",),
    "algo=grpo adaptive_kl=true": ("adapted by dead_band from 0.04 to keep KL at 0.01 nats per token", "speed 1.05"),
    "algo=grpo adaptive_kl=true adaptive_kl.controller_type=schedule": ("follows a schedule from 0.04", "shape cosine"),
    "algo=grpo kl.reference=ema": ("reference: a moving average of the policy (decay 0.99)",),
    "kl.reference=tie": ("measured without a penalty; reference: the policy itself",),
    "constraint_optimization=true constraint_optimization.kl_constraint=0.1": (
        "KL to the reference at most 0.1 nats per token, enforced by a multiplier that grows while the constraint is",
        "with a coefficient that starts at 0",
    ),
    "multi_objective=true multi_objective.objectives=[reward,kl_penalty]": (
        "maximize reward (weight 1), minimize kl (weight 1); combined by weighted_sum",
    ),
    "multi_objective=true multi_objective.objectives=[reward,kl_penalty] eval.n=0": (
        "each scaled by its standard deviation. Without evaluation (eval.n=0) there is no Pareto front.",
        "Evaluation: none.",
    ),
    "adv.estimator=constant adv.constant=0.5": ("reward minus 0.5",),
    "kl_target=0.1": ("Note: No effect: adaptive_kl.target_kl, because adaptive_kl.enabled is not true.",),
    "eval.temperature=0.5 eval.top_k=3": (
        "Note: No effect: eval.temperature, eval.top_k, because eval.k is 0 (evaluation is greedy).",
    ),
    "lora.alpha=8 lora.target=[q_proj]": ("Note: No effect: lora.alpha, lora.target, because lora.rank is 0.",),
    "lora.rank=4": ("only adapters of rank 4 (alpha 16) on all linear layers except the head are trained.",),
    "lora.rank=4 lora.target=[q_proj] dtype=bfloat16": (
        "on the layers q_proj are trained",
        "Matrix products are computed in bfloat16; trained weights stay in float32.",
    ),
}


@pytest.mark.parametrize(("words", "parts"), PARTS.items(), ids=PARTS)
def test_every_part_of_an_algorithm_is_put_in_words(
    words: str, parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", "task=sort", *words.split(" ")]) == 0
    said = unwrapped(capsys.readouterr().out)
    assert [part for part in parts if part not in said] == []


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_algorithm_is_explained_and_what_it_has_not_is_left_out(
    algo: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", "task=sort", f"algo={algo}"]) == 0
    said = unwrapped(capsys.readouterr().out)
    row = ALGORITHMS[algo]
    assert ("\ncritic:\n" in said) == (row.values == "critic") == ("\nValues: a " in said)
    assert ("\nvine:\n" in said) == (row.values == "continuations") == ("continuations" in said.partition("\n\n")[0])
    assert ("\nprime:\n" in said) == ("process" in row.needs) == ("Token rewards" in said)
    assert "what the algorithm says" not in said


def test_a_section_that_is_switched_off_on_purpose_needs_no_note(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "task=sort", "adaptive_kl=false", "adaptive_kl.target_kl=0.1"]) == 0
    assert "Note" not in capsys.readouterr().out


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_every_shipped_configuration_is_explained(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", str(file)]) == 0
    said = unwrapped(capsys.readouterr().out)
    assert said.startswith("novarl ") and "All keys of this run:" in said


def test_the_kind_is_the_files_or_named_or_rl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("kind: sft\ntask: sort\n")
    others = ((["kind=sft", "task=sort"], "sft"), (["--kind", "sft", str(file)], "sft"))
    for words, kind in (([str(file)], "sft"), (["sft", "task=sort"], "sft"), (["task=sort"], "rl"), *others):
        assert cli.main(["explain", *words]) == 0
        assert capsys.readouterr().out.startswith(f"novarl {kind}: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("rl FILE", "FILE kind: kind is 'sft', but the command is novarl explain rl (run novarl explain sft FILE)"),
        (
            "FILE kind=rl",
            "FILE kind: kind is 'sft', but the command is novarl explain rl (run novarl explain sft FILE)",
        ),
        (
            "dpo kind=sft",
            "command line kind: kind is 'sft', but the command is novarl explain dpo (run novarl explain sft)",
        ),
        ("FILE kind=sfd", "command line: kind is 'sfd' (use one of rl, sft, dpo, rm, eval, sample)"),
    ],
)
def test_two_kinds_are_refused_with_the_command_that_explains_the_other(
    words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("kind: sft\ntask: sort\n")
    assert cli.main(["explain", *words.replace("FILE", str(file)).split(" ")]) == 2
    assert said.replace("FILE", str(file)) in capsys.readouterr().err


def test_contradictions_with_the_algorithm_are_found_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("algo=grpo responses_per_prompt=1", "algo=nothing", "algo=dr_grpo kl.coef=0.1"):
        assert cli.main(["explain", "task=sort", *words.split(" ")]) == 2
    assert capsys.readouterr().err.count("\n") == 3


def test_explain_needs_no_torch() -> None:
    code = "import sys; from novarl.cli import main; main(['explain', 'task=sort']); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.endswith("False\n")


def test_other_kinds_in_words() -> None:
    sft = unwrapped(
        describe(
            load(SFTConfig, overrides=["data=x.jsonl", "epochs=2", "optim.warmup_steps=1", "optim.schedule=cosine"])
        )
    )
    assert "fine-tunes tiny on x.jsonl" in sft and "2 epochs" in sft
    assert "warmup over 1 update, cosine decay to 0 of the peak" in sft
    words = ["data=x.jsonl", "steps=10", "batch_size=8", "save_every=null"]
    steps = unwrapped(describe(load(SFTConfig, overrides=words)))
    assert "Total: 10 steps, 80 rows." in steps and "saved at the end;" in steps
    scored = unwrapped(describe(load(EvalConfig, overrides=["task=sort", "model=m", "eval.k=4"])))
    assert "novarl eval: evaluates m on task sort." in scored and "4 samples per row for pass@1 to pass@4" in scored
    assert "m generates 2 answers of at most 256 tokens for one prompt" in describe(
        load(SampleConfig, overrides=["model=m", "prompt=hello", "n=2"])
    )


def test_files_that_are_not_there_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "data=rows.jsonl",
        "eval.data=./more",
        "reward=mine.py:score",
        "rollout.env_path=mine.py",
        "model=/nowhere",
    ]
    named = {"data": "rows.jsonl", "eval.data": "./more", "rollout.env_path": "mine.py", "model": "/nowhere"}
    said = unwrapped(describe(load(RLConfig, overrides=words)))
    for key, path in {**named, "reward.score.source": "mine.py"}.items():
        assert f"Note: {key}: {path} does not exist." in said
    for name in ("rows.jsonl", "more", "mine.py"):
        (tmp_path / name).touch()
    assert describe(load(RLConfig, overrides=words)).count("does not exist") == 1
    hub = ["data=org/rows@train", "model=org/model", "reward=math", "run_dir=./new", "rollout.stop=[./x]"]
    assert "does not exist" not in describe(load(RLConfig, overrides=hub))


def test_what_is_left_open_is_said_to_be_open() -> None:
    said = unwrapped(describe(load(RLConfig, overrides=["task=sort"])))
    assert (
        "the task's maximum length" in said
        and "The number of optimizer updates per step is set by the algorithm" in said
    )
    assert "reward minus the algorithm's baseline" in said


def test_of_a_run_it_says_what_it_was_computed_by(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last beginning counts: a run may go on elsewhere."""
    run = tmp_path / "run"
    finished("rl", *ON_TASK, "steps=1", f"run_dir={run}")
    finished("rl", *ON_TASK, "steps=2", f"run_dir={run}", "attn=eager", "resume=auto")
    capsys.readouterr()
    assert cli.main(["explain", str(run / "config.yaml")]) == 0
    said = unwrapped(capsys.readouterr().out)
    assert "This run started on cpu with eager attention and built-in modules." in said
    (run / "events.jsonl").write_text("")
    assert cli.main(["explain", str(run / "config.yaml")]) == 0
    assert "This run started" not in capsys.readouterr().out


def test_what_is_sampled_elsewhere_is_not_recorded() -> None:
    for words, recorded in ((["compile=true"], True), (["compile=true", "rollout.staleness=1"], False)):
        assert (
            "sampling uses CUDA graphs" in unwrapped(describe(load(RLConfig, overrides=["task=sort", *words])))
        ) == recorded
