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

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(file for file in (ROOT / "configs").iterdir() if file.is_file())


def test_the_arithmetic_of_a_step_and_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    words = "task=sort steps=20 prompts_per_rollout=6 responses_per_prompt=4 updates_per_rollout=8 epochs_per_rollout=2"
    assert cli.main(["explain", *words.split(" "), "algo=ppo_clip", "rollout.max_tokens=32", "run_dir=runs/mine"]) == 0
    said = capsys.readouterr().out
    assert "6 prompts x 4 responses = 24 trajectories of at most 32 tokens (768 sampled tokens at most)" in said
    assert "8 optimiser updates in 2 epochs, 6 trajectories an update" in said
    assert "In all: 20 steps, 480 trajectories, at most 15,360 sampled tokens, 160 optimiser updates." in said
    assert "Writes to runs/mine: " in said


def test_what_the_algorithm_decides_is_filled_in(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(["explain", "task=sort", "algo=grpo", "kl.coef=0.04", "kl.type=loss", "responses_per_prompt=4"]) == 0
    )
    said = capsys.readouterr().out
    assert "the mean of its prompt's responses, divided by their standard deviation" in said
    assert "0.04 x KL (k3) as loss" in said and "ratios stay within [1 - 0.2, 1 + 0.2]" in said
    assert "\n  agg: sequence\n" in said and "\n  lr: null\n" not in said and "\n  estimator: group\n" in said


PARTS = {
    "algo=ppo": (
        "GAE over the tokens of an answer, gamma 1, lambda 0.95; whitened over all tokens",
        "a critic of its own, learnt at learning rate 0.001, 4 updates a step",
        "0.01 x KL (k1) as reward; to the policy as it was when reinforcement began",
    ),
    "algo=ppo critic.shared=true critic.clip=0.2": (
        "a critic on the policy's trunk, learnt with it at weight 0.1, its",
    ),
    "algo=ppo critic.warmup_steps=5": ("it alone learns until step 5 is done",),
    "algo=vineppo vine.samples=4": ("the mean reward of 4 fresh continuations", "every token is a step"),
    "task=arithmetic algo=vineppo": ("a step ends with ' '",),
    "algo=prime": ("0.05 x (log model - log reference)", "right from 0.5 up", "at learning rate"),
    "algo=ppo adv.estimator=vtrace": ("V-trace over the tokens",),
    "correction.tis_max=3": ("each token's loss is weighed by pi_old / mu, at most 3",),
    "correction.type=sequence": ("each answer's loss is weighed by its pi_old / mu, at most 2",),
    "correction.type=icepop": ("tokens whose pi_old / mu lies outside [0.5, 5] are left out",),
    "entropy.target=0.5": ("its weight moves from 0.01 so that the entropy is 0.5 nats per token (rate 0.05)",),
    "correction.type=sequence correction.geometric=true": ("(geometric) of its tokens'",),
    "algo=ppo adv.estimator=clipped_is adv.is_level=trajectory": ("weights of the whole answer over the tokens",),
    "algo=grpo adaptive_kl=true": ("dead_band moves it from 0.04 so that KL is 0.01 nats per token", "speed 1.05"),
    "algo=grpo adaptive_kl=true adaptive_kl.controller_type=schedule": ("follows a schedule from 0.04", "shape cosine"),
    "algo=grpo kl.reference=ema": ("to a moving average of the policy (weight of the past 0.99)",),
    "kl.reference=tie": ("measured, without a penalty; to the policy itself",),
    "constraint_optimization=true constraint_optimization.kl_constraint=0.1": (
        "KL to the reference at most 0.1 nats per token, by a multiplier that grows while the bound is broken",
        "at a price that begins at 0",
    ),
    "multi_objective=true multi_objective.objectives=[reward,kl_penalty]": (
        "more reward (weight 1), less kl (weight 1); combined by weighted_sum",
    ),
    "multi_objective=true multi_objective.objectives=[reward,kl_penalty] eval.n=0": (
        "each in units of its standard deviation. Without evaluations (eval.n=0) there is no front.",
        "Evaluates nothing.",
    ),
    "adv.estimator=constant adv.constant=0.5": ("compared with 0.5",),
    "kl_target=0.1": ("Note: nothing reads adaptive_kl.target_kl, since adaptive_kl.enabled is not true.",),
    "eval.temperature=0.5 eval.top_k=3": (
        "Note: nothing reads eval.temperature, eval.top_k, since eval.k is 0: evaluations are greedy.",
    ),
    "lora.alpha=8 lora.target=[q_proj]": ("Note: nothing reads lora.alpha, lora.target, since lora.rank is 0.",),
    "lora.rank=4": ("Only adapters of rank 4 (alpha 16) on all linear layers but the head are trained.",),
    "lora.rank=4 lora.target=[q_proj] dtype=bfloat16": (
        "on the layers q_proj are trained",
        "Products with weights in bfloat16; trained weights stay float32.",
    ),
}


@pytest.mark.parametrize(("words", "parts"), PARTS.items(), ids=PARTS)
def test_every_part_of_an_algorithm_is_put_in_words(
    words: str, parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", "task=sort", *words.split(" ")]) == 0
    said = capsys.readouterr().out
    assert [part for part in parts if part not in said] == []


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_algorithm_is_explained_and_what_it_has_not_is_left_out(
    algo: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", "task=sort", f"algo={algo}"]) == 0
    said = capsys.readouterr().out
    row = ALGORITHMS[algo]
    assert ("\ncritic:\n" in said) == (row.values == "critic") == ("Values: a critic" in said)
    assert ("\nvine:\n" in said) == (row.values == "continuations") == ("continuations" in said.partition("\n\n")[0])
    assert ("\nprime:\n" in said) == ("process" in row.needs) == ("Rewards of tokens" in said)
    assert "what the algorithm says" not in said


def test_a_section_that_is_switched_off_on_purpose_needs_no_note(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "task=sort", "adaptive_kl=false", "adaptive_kl.target_kl=0.1"]) == 0
    assert "Note" not in capsys.readouterr().out


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_every_shipped_configuration_is_explained(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", str(file)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("novarl ") and "Every key, as this run sees it:" in said


def test_the_kind_is_the_files_or_named_or_rl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("kind: sft\ntask: sort\n")
    others = ((["kind=sft", "task=sort"], "sft"), (["--kind", "sft", str(file)], "sft"))
    for words, kind in (([str(file)], "sft"), (["sft", "task=sort"], "sft"), (["task=sort"], "rl"), *others):
        assert cli.main(["explain", *words]) == 0
        assert capsys.readouterr().out.startswith(f"novarl {kind}: tiny learns")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("rl FILE", "FILE kind: kind is 'sft', and this is novarl explain rl (run novarl explain sft FILE)"),
        ("FILE kind=rl", "FILE kind: kind is 'sft', and this is novarl explain rl (run novarl explain sft FILE)"),
        ("dpo kind=sft", "command line kind: kind is 'sft', and this is novarl explain dpo (run novarl explain sft)"),
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
    sft = describe(
        load(SFTConfig, overrides=["data=x.jsonl", "epochs=2", "optim.warmup_steps=1", "optim.schedule=cosine"])
    )
    assert "tiny learns from x.jsonl" in sft and "2 times through the rows" in sft
    assert "risen to over 1 update, then falling (cosine) to 0 of it" in sft
    steps = describe(load(SFTConfig, overrides=["data=x.jsonl", "steps=10", "batch_size=8", "save_every=null"]))
    assert "In all: 10 steps, 80 rows." in steps and "Saves at the end;" in steps
    scored = describe(load(EvalConfig, overrides=["task=sort", "model=m", "eval.k=4"]))
    assert "novarl eval: m on the task sort." in scored and "4 samples of each for pass@1 to pass@4" in scored
    assert "m gives 2 answers of at most 256 tokens to one prompt" in describe(
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
    said = describe(load(RLConfig, overrides=words))
    for key, path in {**named, "reward.score.source": "mine.py"}.items():
        assert f"Note: there is no {path} here, which {key} names." in said
    for name in ("rows.jsonl", "more", "mine.py"):
        (tmp_path / name).touch()
    assert describe(load(RLConfig, overrides=words)).count("Note: there is no") == 1
    hub = ["data=org/rows@train", "model=org/model", "reward=math", "run_dir=./new", "rollout.stop=[./x]"]
    assert "there is no" not in describe(load(RLConfig, overrides=hub))


def test_what_is_left_open_is_said_to_be_open() -> None:
    said = describe(load(RLConfig, overrides=["task=sort"]))
    assert "as many tokens as the task allows" in said and "The algorithm says how many optimiser updates" in said
    assert "compared with what the algorithm says" in said


def test_of_a_run_it_says_what_it_was_computed_by(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last beginning counts: a run may go on elsewhere."""
    run = tmp_path / "run"
    finished("rl", *ON_TASK, "steps=1", f"run_dir={run}")
    finished("rl", *ON_TASK, "steps=2", f"run_dir={run}", "attn=eager", "resume=auto")
    capsys.readouterr()
    assert cli.main(["explain", str(run / "config.yaml")]) == 0
    said = capsys.readouterr().out
    assert "This run began on cpu: attention by eager, modules built-in." in said
    (run / "events.jsonl").write_text("")
    assert cli.main(["explain", str(run / "config.yaml")]) == 0
    assert "This run began" not in capsys.readouterr().out


def test_what_is_sampled_elsewhere_is_not_recorded() -> None:
    for words, recorded in ((["compile=true"], True), (["compile=true", "rollout.staleness=1"], False)):
        assert ("sampling is recorded" in describe(load(RLConfig, overrides=["task=sort", *words]))) == recorded
