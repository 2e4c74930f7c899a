"""What every recipe promises: one short file that stands alone, runs, and saves what it has learnt."""

from __future__ import annotations

import ast
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.recipes.world import FOLDER, NAMES, PROMPTS, arguments, recipe, tokenizer, trained

LINES = 185
"""Of code and comments at most; the story at the top and blank lines are not counted."""
TINY = ["--num-epochs", "1", "--output-dir"]
SORTING = ["--batch-size", "88", "--warmup-steps", "2", "--eval-size", "4", "--max-new-tokens", "3"]
WRITING = [
    "--num-words",
    "3",
    "--batch-size",
    "20",
    "--warmup-steps",
    "2",
    "--eval-samples",
    "1",
    "--max-new-tokens",
    "4",
]
SMALL = {
    "reinforce": [*WRITING, "--max-new-tokens", "4"],
    "rloo": [*WRITING, "--max-new-tokens", "4", "--group-size", "2"],
    "grpo": [*SORTING, "--group-size", "2", "--updates-per-batch", "1"],
    "ppo": [*SORTING, "--updates-per-batch", "1"],
    "vineppo": [*SORTING, "--updates-per-batch", "1", "--continuations", "1"],
    "prime": [*SORTING, "--group-size", "2", "--updates-per-batch", "1"],
    "dpo": [*WRITING, "--max-new-tokens", "9", "--num-pairs", "20"],
    "reward_model": ["--num-words", "3", "--num-pairs", "40", "--eval-pairs", "20"],
    "sft": ["--batch-size", "88", "--eval-size", "4", "--max-new-tokens", "3"],
}


def tree(name: str) -> ast.Module:
    return ast.parse((FOLDER / f"{name}.py").read_text("utf-8"))


def functions(name: str) -> dict[str, str]:
    found = [node for node in tree(name).body if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.unparse(node) for node in found}


def test_no_recipe_is_forgotten() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == set(NAMES) == set(SMALL)


@pytest.mark.parametrize("name", NAMES)
def test_stands_alone(name: str) -> None:
    allowed = {*sys.stdlib_module_names, "torch", "transformers"}
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= allowed
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and (node.module or "").split(".")[0] in allowed


@pytest.mark.parametrize("name", NAMES)
def test_can_be_read_in_one_sitting(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text("utf-8")
    _, story, code = text.split('"""', 2)
    assert story.strip(), "the file begins with what it is about"
    assert len([line for line in code.splitlines() if line.strip()]) <= LINES
    assert all(len(line) <= 120 for line in text.splitlines())


SHARED = {
    "load": {"reward_model"},
    "encode": {"reward_model", "sft"},
    "generate": {"reinforce"},
    "logprobs": set(),
    "update": set(),
    "reward": {"reinforce", "rloo", "dpo", "reward_model"},
    "topics": set(),
    "problems": set(),
    "ppo_loss": set(),
    "whiten": set(),
}
"""What several recipes have alike, and which ones differ for a reason: scoring, appending or decoding otherwise."""


@pytest.mark.parametrize("function", SHARED)
def test_copies_do_not_drift(function: str) -> None:
    texts = {name: functions(name)[function] for name in NAMES if function in functions(name)}
    assert len(texts) > 1
    assert len({text for name, text in texts.items() if name not in SHARED[function]}) == 1


def test_the_copies_that_differ_agree_among_themselves() -> None:
    assert len({functions(name)["reward"] for name in ("reinforce", "rloo", "dpo", "reward_model")}) == 1


@pytest.mark.parametrize("name", NAMES)
def test_runs_and_saves(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module, folder = recipe(name), tmp_path / "out"
    before, after = module.main([*SMALL[name], *TINY, str(folder), "--save-every", "1"])
    assert 0.0 <= before <= 1.0 or name in ("reinforce", "rloo", "dpo")
    assert isinstance(after, float)
    printed = capsys.readouterr().out
    assert f"{before:.3f} before, {after:.3f} after" in printed
    kind = transformers.AutoModelForSequenceClassification if name == "reward_model" else None
    saved = (kind or transformers.AutoModelForCausalLM).from_pretrained(folder)
    early = (kind or transformers.AutoModelForCausalLM).from_pretrained(folder / "epoch-1")
    for one, other in zip(saved.parameters(), early.parameters(), strict=True):
        assert torch.equal(one, other), "the last epoch's save is the end's"


def test_as_a_command(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "sft.py"), *SMALL["sft"], *TINY, str(tmp_path / "out")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "held-out accuracy" in done.stdout


def test_goes_on_from_a_saved_model(tmp_path: Path) -> None:
    """`--model-id` loads what another recipe saved, or anything of that form; the tiny model's warm-up is left out."""
    recipe("sft").main([*SMALL["sft"], *TINY, str(tmp_path / "sft")])
    changes = [*SMALL["grpo"], "--learning-rate", "0", *TINY, str(tmp_path / "rl"), "--model-id", str(tmp_path / "sft")]
    recipe("grpo").main(changes)
    one, other = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("sft", "rl"))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_cannot_be_loaded_is_one_sentence(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        recipe(name).main(["--model-id", "/no/such"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1 and said.startswith("--model-id /no/such cannot be loaded: ")


@pytest.mark.parametrize("name", ["rloo", "grpo", "prime"])
def test_a_group_of_one_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        recipe(name).parse_args(["--group-size", "1"])
    assert "--group-size must be at least 2" in capsys.readouterr().err


def test_promised_flags() -> None:
    promised = "model_id batch_size learning_rate num_epochs grad_clip output_dir save_every seed"
    for name in NAMES:
        assert set(promised.split()) <= vars(recipe(name).parse_args([])).keys()
    args = recipe("reinforce").parse_args(["--baseline", "ema"])
    assert (args.batch_size, args.num_epochs, args.ema_beta, args.grad_clip) == (8, 25, 0.9, 1.0)
    assert (recipe("rloo").parse_args([]).group_size, recipe("rloo").parse_args([]).num_epochs) == (4, 6)
    with pytest.raises(SystemExit):
        recipe("reinforce").parse_args(["--baseline", "median"])


@pytest.mark.parametrize(
    ("text", "scale", "expected"),
    [
        ("stone", 0.5, 1 - 0.5 * 79 / 80),
        ("stone", 0.0, 1.0),
        ("", 0.5, -0.5),
        ("Don't STOP, 2 don't", 0.5, 2 / 3 - 0.5 * 77 / 80),
        (" ".join(f"{a}{b}" for a in "abcdefghij" for b in "klmnopqr"), 0.5, 1.0),
    ],
)
def test_lexical_richness_is_nanorls(text: str, scale: float, expected: float) -> None:
    args = arguments("reinforce", num_words=100, brevity_penalty_scale=scale)
    assert recipe("reinforce").reward(text, args) == pytest.approx(expected)


def test_held_out_problems_are_others() -> None:
    import random

    grpo, rloo = recipe("grpo"), recipe("rloo")
    train, test = ({answer for _, answer in grpo.problems(split, random.Random(0))} for split in ("train", "test"))
    assert (len(train), len(test)) == (176, 76) and not train & test
    train, test = (set(rloo.topics(split, arguments("rloo"))) for split in ("train", "test"))
    assert (len(train), len(test)) == (60, 20) and not train & test


class Scripted:
    """Stands in for a model: its replies are known."""

    def __init__(self, replies: Tensor, eos: Any) -> None:
        self.replies = replies
        self.generation_config = transformers.GenerationConfig(eos_token_id=eos, pad_token_id=7)
        self.asked: dict[str, Any] = {}

    def generate(self, **how: Any) -> Tensor:
        self.asked = how
        return torch.cat([how["input_ids"], self.replies], 1)


@pytest.mark.parametrize("eos", [7, [9, 7]])
@pytest.mark.parametrize("name", ["grpo", "reinforce"])
def test_eos_is_trained_even_where_it_is_the_padding(name: str, eos: Any) -> None:
    replies = torch.tensor([[5, 7, 7, 7], [5, 6, 5, 6], [7, 7, 7, 7], [5, 5, 5, 7]])
    prompt = torch.tensor([[7, 3], [4, 3], [7, 3], [4, 3]])
    attention = torch.tensor([[False, True], [True, True], [False, True], [True, True]])
    model = Scripted(replies, eos)
    _, seen, mask, _ = recipe(name).generate(model, tokenizer(), prompt, attention, arguments(name, temperature=0.7))
    chosen = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 1]]).bool()
    assert torch.equal(mask[:, 2:], chosen) and not mask[:, :2].any()
    assert torch.equal(seen, torch.cat([attention, chosen], 1))
    assert model.asked["do_sample"] and model.asked["temperature"] == 0.7 and model.asked["top_k"] == 0
    if name == "reinforce":
        recipe(name).generate(model, tokenizer(), prompt, attention, arguments(name), greedy=True)
        assert model.asked["do_sample"] is False


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_padding_changes_no_logprob(dtype: torch.dtype) -> None:
    """With absolute positions (float64: GPT-2) and rotary ones (float32: Qwen3)."""
    grpo, model = recipe("grpo"), trained(dtype)
    tokens, attention = grpo.encode(tokenizer(), list(PROMPTS), ["ab"] * len(PROMPTS))
    logp = grpo.logprobs(model, tokens, attention, 0.8)
    for row, own in enumerate(attention):
        alone = grpo.logprobs(model, tokens[row : row + 1, own], attention[row : row + 1, own], 0.8)
        assert (alone[0, 1:] - logp[row, own][1:]).abs().max() < (1e-10 if dtype == torch.float64 else 1e-5)
    assert not attention.all() and logp[attention].isfinite().all()


def test_what_is_sampled_has_the_probability_it_is_trained_with() -> None:
    """At the sampling temperature: 600 replies' first tokens against exp(logprobs)."""
    grpo, model = recipe("grpo"), trained(torch.float32)
    torch.manual_seed(0)
    args = arguments("grpo", temperature=2.0, max_new_tokens=1)
    prompt, attention = grpo.encode(tokenizer(), [PROMPTS[0]] * 600)
    tokens, attention, _, _ = grpo.generate(model, tokenizer(), prompt, attention, args)
    with torch.no_grad():
        logp = grpo.logprobs(model, tokens, attention, args.temperature)[:, -1]
    expected = {token: p.exp().item() for token, p in zip(tokens[:, -1].tolist(), logp, strict=True)}
    token, p = max(expected.items(), key=lambda item: item[1])
    assert 0.1 < p < 0.9
    assert (tokens[:, -1] == token).float().mean().item() == pytest.approx(p, abs=4 * (p * (1 - p) / 600) ** 0.5)


def test_a_hub_models_sampling_habits_are_dropped(tmp_path: Path) -> None:
    """Top-k, top-p and repetition penalty in generation_config.json would sample from another distribution."""
    recipe("sft").main([*SMALL["sft"], *TINY, str(tmp_path)])
    habits = {"top_k": 3, "top_p": 0.5, "repetition_penalty": 1.5, "do_sample": True, "eos_token_id": [1, 5]}
    transformers.GenerationConfig(**habits).save_pretrained(tmp_path)
    model, _ = recipe("grpo").load(str(tmp_path))
    kept = model.generation_config
    assert (kept.repetition_penalty or 1.0, kept.top_p or 1.0, kept.eos_token_id) == (1.0, 1.0, [1, 5])
    assert next(model.parameters()).dtype == torch.float32


def test_steps_of_vineppo_begin_after_the_token_that_ends_the_last() -> None:
    vine = recipe("vineppo")
    reply = tokenizer().encode("ab. c. d", add_special_tokens=False)
    assert vine.step_begins(tokenizer(), reply, ". ") == [0, 4, 7]
    assert vine.step_begins(tokenizer(), reply, "") == list(range(len(reply)))
    assert all(a < b for a, b in pairwise(vine.step_begins(tokenizer(), reply, "")))


def test_vineppo_estimates_equal_states_once() -> None:
    vine, model = recipe("vineppo"), trained(torch.float32)
    args = arguments("vineppo", continuations=3, max_new_tokens=4)
    prompt, _ = vine.encode(tokenizer(), [PROMPTS[0]])
    asked, letters = tuple(prompt[0].tolist()), tuple(tokenizer().encode("abc", add_special_tokens=False))
    states = [(asked, (), "abc"), (asked, letters[:2], "abc"), (asked, (), "abc")]
    rows: list[int] = []
    whole = model.generate
    model.generate = lambda **how: rows.append(len(how["input_ids"])) or whole(**how)
    torch.manual_seed(0)
    values = vine.state_values(model, tokenizer(), states, args)
    assert rows == [6] and set(values) == set(states)
    assert values[states[1]] > values[states[0]], "the model knows its answers: with 'ab' written the rest is likely"
