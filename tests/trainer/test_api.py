"""The Python API: in every surrounding, beside the command line, left early and resumed, with whatever it is given."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import novarl
from novarl.core.errors import NovaError
from tests.compose.harness import alerts, events, finished, lightly, metrics, questions, write_rows

ROWS = [{"prompt": f"sort: {letters}"} for letters in ("dcba", "ba", "cab", "dc")]
SMALL: dict[str, Any] = {
    "prompts_per_rollout": 2,
    "responses_per_prompt": 2,
    "max_new_tokens": 4,
    "log": {"console": False, "tensorboard": False},
}
BLOCK = """
import novarl

rows = [{"prompt": "sort: dcba"}, {"prompt": "sort: ba"}, {"prompt": "sort: cab"}, {"prompt": "sort: dc"}]


def my_function(completions, **_):
    return [float(text.count("a")) for text in completions]


trainer = novarl.RL(
    model="tiny",
    prompts=rows,
    reward=my_function,
    algo="grpo", steps=40, kl={"coef": 0.02}, run_dir="runs/x",
)
for record in trainer:
    if record["step"] == 2:
        break
summary = trainer.run()
found = trainer.evaluate()
answers = trainer.generate(["sort: dcaeb"])
trainer.save("out")
rollouts = trainer.rollouts(step=10)
run = novarl.load_run("runs/x")
curves = run.plot()
"""
"""What the documentation of the API shows."""
SHORT = BLOCK.replace("steps=40", "steps=10, max_new_tokens=4, prompts_per_rollout=2, responses_per_prompt=2")
"""The same, in seconds."""
LEFT = """
assert summary["status"] == "done" and summary["steps"] == len(run.metrics) == 10
assert found.n == 4 and len(answers) == 1 and isinstance(answers[0], str)
assert len(rollouts) == 4 and rollouts[0].advantages and rollouts.to_pandas().shape[0] == 4
assert novarl.RL(model="out", prompts=rows, reward=my_function, steps=1).model is not None
assert curves and all(path.is_file() for path in curves)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    with lightly(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no held-out rows", UserWarning)
        yield tmp_path


def chars(completions: list[Any], **_: Any) -> list[float]:
    return [float(text.count("e")) for text in completions]


def trained(**settings: Any) -> novarl.RL:
    """A run of two small steps, to its end."""
    trainer = novarl.RL(**{"prompts": ROWS, "reward": chars, "steps": 2, "run_dir": "run", **SMALL, **settings})
    trainer.run()
    return trainer


# Surroundings


def test_the_block_runs_in_a_script() -> None:
    Path("script.py").write_text(f"{SHORT}{LEFT}import sys\nassert 'IPython' not in sys.modules\n")
    done = subprocess.run([sys.executable, "-W", "error::ResourceWarning", "script.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "UserWarning: no held-out rows" in done.stderr


def test_the_block_runs_where_an_event_loop_runs_already() -> None:
    """As in a notebook's kernel, which runs cells within its loop."""

    names: dict[str, Any] = {"__name__": "__main__"}

    async def cell() -> None:
        exec(compile(SHORT + LEFT, "cell", "exec"), names)
        await asyncio.sleep(0)

    asyncio.run(cell())
    assert names["summary"]["steps"] == 10 and len(names["rollouts"]) == 4


def test_the_block_runs_in_a_thread_twice_in_one_process() -> None:
    failed: list[str] = []

    def work(place: str) -> None:
        try:
            exec(compile((SHORT + LEFT).replace("runs/x", place), place, "exec"), {"__name__": "__main__"})
        except BaseException:  # noqa: BLE001 - told to the main thread
            failed.append(traceback.format_exc())

    for place in ("runs/one", "runs/two"):
        thread = threading.Thread(target=work, args=(place,))
        thread.start()
        thread.join()
    assert not failed, failed[0]
    assert weights_of("runs/one") == weights_of("runs/two")


def test_two_trainers_side_by_side_do_not_touch_one_another() -> None:
    alone = [record["reward_mean"] for record in settings_of("alone", seed=1)]
    one, two = settings_of("one", seed=1), settings_of("two", seed=2)
    both = [(first["reward_mean"], second["reward_mean"]) for first, second in zip(one, two, strict=True)]
    assert [first for first, _ in both] == alone


def settings_of(place: str, **settings: Any) -> novarl.RL:
    return novarl.RL(prompts=ROWS, reward=chars, steps=3, run_dir=place, **SMALL, **settings)


def test_importing_novarl_loads_neither_torch_nor_transformers() -> None:
    code = "import novarl, sys; assert not {'torch', 'transformers', 'pydantic'} & set(sys.modules), 'loaded'"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Beside the command line

CLOCKS = re.compile(r"time/|memory_|(tokens|episodes)_per_second$")


def numbers_of(place: str | Path) -> list[dict[str, Any]]:
    """metrics.jsonl without clocks and memory."""
    return [{name: value for name, value in row.items() if not CLOCKS.match(name)} for row in metrics(Path(place))]


def weights_of(place: str | Path) -> bytes:
    return (Path(place) / "checkpoints/latest/model/model.safetensors").read_bytes()


SAME: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "rl": (novarl.RL, {"task": "sort", "warmup": 2, "steps": 2, "algo": "grpo", "kl": {"coef": 0.02}}),
    "sft": (novarl.SFT, {"data": "rows.jsonl", "steps": 2, "batch_size": 2}),
    "dpo": (novarl.DPO, {"data": "pairs.jsonl", "steps": 2, "batch_size": 2}),
    "rm": (novarl.RewardModel, {"data": "pairs.jsonl", "steps": 2, "batch_size": 2}),
}


@pytest.mark.parametrize("command", SAME)
def test_the_command_line_writes_the_same_weights_and_metrics(command: str) -> None:
    make, settings = SAME[command]
    write_rows(Path("rows.jsonl"), questions())
    write_rows(Path("pairs.jsonl"), PAIRS)
    small = SMALL if command == "rl" else {"log": SMALL["log"]}
    settings = {**settings, **small, "eval": {"n": 2}, "optim": {"lr": 1e-3}, "seed": 5}
    words = [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in settings.items()]
    finished(command, *words, "run_dir=typed")
    summary = make(**settings, run_dir="called").run()
    assert summary["status"] == "done"
    assert weights_of("typed") == weights_of("called")
    assert numbers_of("typed") == numbers_of("called") and len(numbers_of("called")) >= 2


# Left early


@pytest.mark.parametrize("stop", [1, 2])
def test_a_run_left_early_and_resumed_is_the_run_that_was_not(stop: int) -> None:
    whole = novarl.RL(task="sort", warmup=2, steps=3, run_dir="whole", eval={"n": 2}, **SMALL)
    whole.run()

    def half(**more: Any) -> novarl.RL:
        return novarl.RL(task="sort", warmup=2, steps=3, run_dir="halves", eval={"n": 2}, **SMALL, **more)

    first = half()
    for record in first:
        if record["step"] == stop and "reward_mean" in record:
            break
    first.close()
    assert first.summary is not None and first.summary["status"] == "stopped"
    with half(resume="auto") as second:
        rest = list(second)
    assert rest[0]["step"] == stop + 1
    assert weights_of("halves") == weights_of("whole") and numbers_of("halves") == numbers_of("whole")


def test_iterating_again_goes_on_and_run_goes_to_the_end() -> None:
    trainer = novarl.RL(prompts=ROWS, reward=chars, steps=4, run_dir="run", **SMALL)
    assert next(trainer)["step"] == 1
    for record in trainer:
        assert record["step"] == 2
        break
    assert trainer.summary is None
    assert trainer.run()["steps"] == 4 and trainer.run()["steps"] == 4
    assert list(trainer) == []


@pytest.mark.parametrize("begun", [False, True])
def test_a_closed_trainer_says_that_it_is_closed(begun: bool) -> None:
    trainer = novarl.RL(prompts=ROWS, reward=chars, steps=4, run_dir="run", **SMALL)
    if begun:
        next(trainer)
    trainer.close()
    trainer.close()
    for use in (trainer.run, lambda: next(trainer), lambda: trainer.generate("a"), lambda: trainer.save("out")):
        with pytest.raises(NovaError, match="closed"):
            use()
    assert Path("run").exists() == begun


def test_a_finished_run_is_made_longer_in_the_same_process() -> None:
    trained()
    assert trained(steps=3, resume="auto").summary["steps"] == 3  # type: ignore[index]
    assert [row["step"] for row in metrics(Path("run"))] == [1, 2, 3]


# Rewards that are functions


def test_a_reward_that_raises_is_excluded_and_reported_with_file_and_line() -> None:
    def per_answer(messages: list[Any], answer: Any = None) -> float:
        if "cab" in messages[0]["content"]:
            raise ValueError("no cab")
        return 1.0

    trained(reward=per_answer, prompts_per_rollout=4)
    failed = events(Path("run"), "failed_rollout")
    line = per_answer.__code__.co_firstlineno + 2
    assert len(failed) == 4 and all(f'{Path(__file__).name}", line {line}' in event["error"] for event in failed)
    assert [row["failed_rollouts"] for row in metrics(Path("run"))] == [2.0, 2.0]
    assert [row["reward_mean"] for row in metrics(Path("run"))] == [1.0, 1.0]


def test_a_reward_that_hangs_is_reported_and_the_run_goes_on() -> None:
    let_go = threading.Event()

    def per_answer(messages: list[Any], answer: Any = None) -> float:
        if "cab" in messages[0]["content"]:
            let_go.wait(60)
        return 1.0

    try:
        trained(reward=per_answer, prompts_per_rollout=4, rollout={"reward_timeout": 0.3}, steps=1)
    finally:
        let_go.set()
    failed = events(Path("run"), "failed_rollout")
    assert len(failed) == 2
    assert all("timed out after 0.3 s" in event["error"] and "file.py" in event["error"] for event in failed)


@pytest.mark.parametrize("where", ["loop", "thread"])
def test_a_reward_that_awaits_is_awaited(where: str) -> None:
    async def per_answer(messages: list[Any], answer: Any = None) -> float:
        await asyncio.sleep(0.01)
        return 2.0

    async def cell() -> None:
        trained(reward=per_answer)

    asyncio.run(cell()) if where == "loop" else trained(reward=per_answer)
    assert [row["reward_mean"] for row in metrics(Path("run"))] == [2.0, 2.0]


def test_several_rewards_by_name_with_weights() -> None:
    def short(completions: list[str], **_: Any) -> list[float]:
        return [1.0 for _ in completions]

    trained(reward={"chars": {"source": chars, "weight": 0.0}, "short": {"source": short, "weight": 3.0}})
    rows = metrics(Path("run"))
    assert [row["reward_mean"] for row in rows] == [3.0, 3.0] and rows[0]["rewards/short_mean"] == 1.0
    trained(reward=[chars, short], run_dir="listed")
    assert {"rewards/chars_mean", "rewards/short_mean"} <= set(metrics(Path("listed"))[0])


# Models that are objects


class Recurrent(nn.Module):
    """The smallest causal model there is: a GRU."""

    def __init__(self, tokens: int = 262, size: int = 96) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(tokens, size), nn.Linear(size, tokens)
        self.cells = nn.GRU(size, size, batch_first=True)

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        hidden, _ = self.cells(self.embedding(tokens))
        return self.head(hidden)


CHAT = "{% for m in messages %}{{ m.content + ('\n' if m.role == 'user' else eos_token) }}{% endfor %}"


def module() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"model": Recurrent()}


def pretrained() -> dict[str, Any]:
    """A transformers model made here, and a tokenizer of bytes."""
    from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.chat_template = CHAT
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), eos_token_id=1, pad_token_id=0, initializer_range=0.1, **sizes)
    torch.manual_seed(0)
    return {"model": LlamaForCausalLM(config), "tokenizer": tokenizer}


@pytest.mark.parametrize("make", [module, pretrained])
def test_models_that_are_objects_learn_the_bandit(make: Callable[[], dict[str, Any]]) -> None:
    given = make()
    settings: dict[str, Any] = {"prompts": "bandit", "warmup": 60, "steps": 25, "run_dir": "run", "log": SMALL["log"]}
    trainer = novarl.RL(**given, **settings, prompts_per_rollout=16, responses_per_prompt=8, eval={"n": 16})
    summary = trainer.run()
    assert summary["after"]["score"] > summary["before"]["score"] + 0.3, (summary["before"], summary["after"])
    assert trainer.model is given["model"]  # and it is what was trained
    before = make()["model"].state_dict()
    assert any(not torch.equal(before[name], value) for name, value in given["model"].state_dict().items())
    assert trainer.evaluate().score == summary["after"]["score"]


def test_a_module_is_saved_and_goes_on_bit_by_bit() -> None:
    def run(place: str, **more: Any) -> novarl.RL:
        return novarl.RL(model=module()["model"], prompts=ROWS, reward=chars, run_dir=place, **SMALL, **more)

    run("whole", steps=4).run()
    with run("halves", steps=4) as first:
        next(first), next(first)
    run("halves", steps=4, resume="auto").run()
    assert weights_of("halves") == weights_of("whole") and numbers_of("halves") == numbers_of("whole")
    with pytest.raises(NovaError, match="an object of the Python program"):
        novarl.RL(model="python:Recurrent", prompts=ROWS, reward=chars, steps=1).run()


class Peeking(Recurrent):
    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        return super().forward(tokens.flip(1), position_ids).flip(1)


class Positional(Recurrent):
    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tokens, tokens)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Peeking(), "is not a causal language model"),
        (Positional(), r"define forward\(tokens, position_ids\)"),
        (Recurrent(tokens=100), "the tokenizer has 262 tokens, but the model only 100"),
        (nn.Identity(), "no parameters"),
    ],
    ids=["peeks", "one argument", "few tokens", "nothing to train"],
)
def test_a_module_that_is_no_language_model_is_refused_in_one_sentence(model: nn.Module, said: str) -> None:
    with pytest.raises(NovaError, match=said):
        trained(model=model)
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lora": {"rank": 4}}, "leave lora out"),
        ({"compile": True}, "leave compile out"),
    ],
    ids=str,
)
def test_what_a_module_of_the_users_own_cannot_do_is_said_before_the_run(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(NovaError, match=said):
        trained(model=Recurrent(), **settings)
    assert not Path("run").exists()


def test_a_critic_on_a_module_of_the_users_own_is_refused_in_one_sentence() -> None:
    with pytest.raises(NovaError, match="no hidden states, which critics and value heads need"):
        trained(model=Recurrent(), algo="ppo")


# Rows

PAIRS = [{"prompt": f"What is {i}?", "chosen": f"It is {i}.", "rejected": "No idea."} for i in range(20)]


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (novarl.SFT, {"data": questions()}),
        (novarl.SFT, {"data": questions(), "model": Recurrent()}),
        (novarl.DPO, {"data": PAIRS}),
        (novarl.DPO, {"data": PAIRS, "model": Recurrent()}),
        (novarl.RewardModel, {"data": PAIRS}),
    ],
    ids=["sft", "sft module", "dpo", "dpo module", "rm"],
)
def test_other_trainers_take_rows_and_modules_and_learn(make: Callable[..., Any], given: dict[str, Any]) -> None:
    log = {"console": False, "tensorboard": False}
    with make(**given, steps=8, batch_size=8, optim={"lr": 3e-3}, run_dir="run", log=log) as trainer:
        losses = [record["loss"] for record in trainer]
        assert losses[-1] < losses[0] and trainer.summary["status"] == "done"
        assert trainer.evaluate().n == trainer.summary["after"]["n"] > 0


def test_prompts_are_dictionaries_strings_data_sets_or_tasks() -> None:
    from datasets import Dataset

    texts = [row["prompt"] for row in ROWS]
    for place, prompts in {"dicts": ROWS, "strings": texts, "set": Dataset.from_list(ROWS)}.items():
        trained(prompts=prompts, run_dir=place)
    assert weights_of("dicts") == weights_of("strings") == weights_of("set")
    messages = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    trained(prompts=messages, run_dir="chat", reward=lambda completions, **_: [float(len(c)) for c in completions])
    assert metrics(Path("chat"))[0]["reward_mean"] == 1.0
    trained(prompts="sort", reward=None, warmup=1, run_dir="task", eval={"n": 2})


def test_columns_reach_the_reward() -> None:
    def right(completions: list[str], level: list[int], **_: Any) -> list[float]:
        return [float(one) for one in level]

    trained(prompts=[{**row, "level": 7} for row in ROWS], reward=right)
    assert metrics(Path("run"))[0]["reward_mean"] == 7.0


def test_none_is_null_and_not_the_default() -> None:
    assert trained(save_every=None).log.config["save_every"] is None
    assert trained(run_dir="other").log.config["save_every"] == 50


def test_a_trainer_and_an_evaluation_are_shown_in_one_line() -> None:
    trainer = novarl.RL(prompts=ROWS, reward=chars, steps=2, run_dir="run", **{**SMALL, "algo": "grpo"})
    assert repr(trainer) == "novarl.RL(algo='grpo', model='tiny', step=0, run_dir='run')"
    next(trainer)
    assert repr(trainer).startswith("novarl.RL(algo='grpo', model='tiny', step=1, run_dir='") and Path("run").exists()
    with pytest.warns(UserWarning, match="no held-out rows"):
        found = trainer.evaluate()
    low, high = found.interval
    assert repr(found) == f"Evaluation(score={found.score:.3f}, interval=({low:.3f}, {high:.3f}), n={found.n})"
    trainer.close()


# Errors


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"algo": "gpro"}, "did you mean grpo"),
        ({"stepz": 3}, "did you mean steps"),
        ({"kl": {"coeff": 0.1}}, "did you mean kl.coef"),
        ({"steps": "many"}, "steps"),
        ({"optim": {"lr": -1.0}}, "optim.lr"),
        ({"reward": "sentimnt"}, "did you mean sentiment"),
        ({"reward": 3}, "reward: must be a function, a name or a mapping, got 3"),
        ({"reward": {"a": 3}}, "reward.a: must be a function, a name or a mapping, got 3"),
        ({"prompts": []}, "prompts: the dataset is empty"),
        ({"prompts": 7}, "prompts"),
        ({"prompts": [3, 4]}, "prompts[0]: has type int, but a row is a dict or a string"),
        ({"prompts": [*ROWS, 3]}, f"prompts: 1 of {len(ROWS) + 1} rows cannot be used, more than max_bad_rows"),
        ({"prompts": [*ROWS, 3]}, f"prompts[{len(ROWS)}]: has type int"),
        ({"prompts": [{"prompt": "a"}, {"question": "b"}]}, "prompts[1]"),
        ({"prompts": {"prompt": ["a"]}}, "prompts: a dict of columns is not supported (pass a list of dicts"),
        ({"args": {"max_steps": 1}}, "args: TRL's object of settings is not supported (pass its fields as arguments"),
        (
            {"args": types.SimpleNamespace(max_steps=1)},
            "args: TRL's object of settings is not supported (pass its fields",
        ),
        ({"tokenizer": "tiny"}, "tokenizer"),
        ({"model": Recurrent(), "tokenizer": "no/such/folder"}, "no/such/folder"),
        ({"prompts": "sorte"}, "sort"),
        ({"prompts": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"model": 3}, "model"),
        ({"model": "tinny"}, "did you mean tiny"),
        ({"env": 3}, "env"),
        ({"engine": 3}, "engine"),
        ({"run_dir": None, "resume": "auto"}, "resume"),
        ({"steps": torch.tensor([1, 2])}, "steps"),
    ],
    ids=str,
)
def test_mistakes_are_one_sentence_that_names_the_place(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(NovaError) as caught:
        trained(**settings)
    text = str(caught.value)
    assert said in text and "\n" not in text and "pydantic" not in text.lower() and "validation error" not in text
    assert len(text) < 400 and caught.value.code == 2
    assert not Path("run").exists()


def test_evaluation_without_held_out_rows_is_of_the_training_rows_and_warns() -> None:
    trainer = trained()
    with pytest.warns(UserWarning, match="no held-out rows"):
        assert trainer.evaluate().n == 4
    assert any("held-out" in said for said in alerts(Path("run")))


def test_generate_answers_strings_and_conversations() -> None:
    trainer = trained()
    asked: list[Any] = ["sort: ba", [{"role": "user", "content": "sort: ba"}]]
    greedy = trainer.generate(asked)
    assert greedy[0] == greedy[1] and trainer.generate("sort: ba") == greedy[:1]
    many = trainer.generate(asked, n=3, temperature=1.0, max_tokens=6, seed=1)
    assert [len(answers) for answers in many] == [3, 3] and len(set(many[0])) > 1
    assert trainer.generate(asked, n=3, temperature=1.0, max_tokens=6, seed=1) == many
    with pytest.raises(NovaError, match="unknown setting 'temprature'"):
        trainer.generate("a", temprature=1.0)


@pytest.mark.parametrize("names", [("prompts", "data"), ("data", "prompts"), ("prompts", "train_dataset")])
def test_two_names_of_one_argument_are_refused(names: tuple[str, str]) -> None:
    with pytest.raises(novarl.NovaError, match=f"{names[0]} and {names[1]}"):
        novarl.RL(reward=chars, **{names[0]: ROWS, names[1]: ROWS[:2]})


def test_an_argument_without_a_name_is_refused_in_one_sentence() -> None:
    with pytest.raises(novarl.NovaError, match="all arguments have names, got 'tiny'"):
        novarl.RL("tiny")


def test_what_a_trainer_cannot_do_is_one_sentence() -> None:
    trainer = trained()
    with pytest.raises(novarl.NovaError, match="a string or a list of messages, got 3"):
        trainer.generate([3])  # type: ignore[list-item]
    Path("taken").write_text("")
    with pytest.raises(novarl.NovaError, match="this is a file"):
        trainer.save("taken")
    assert list(trainer.rollouts()) == list(trainer.rollouts(2))


def test_after_a_run_with_objects_the_advice_is_python(capsys: pytest.CaptureFixture[str]) -> None:
    trained(log={"console": True, "tensorboard": False})
    page = capsys.readouterr().out
    assert "novarl.RL(…, " in page and "config.yaml" not in page
    assert json.loads(Path("run/summary.json").read_text())["from_python"] is True


def test_a_resumed_run_with_fewer_steps_says_that_nothing_is_left() -> None:
    with novarl.RL(prompts=ROWS, reward=chars, steps=5, run_dir="run", **SMALL) as trainer:
        for record in trainer:
            if record["step"] == 3:
                break
    trained(steps=2, resume="auto")
    assert any("already trained for 3 steps" in said for said in alerts(Path("run")))
