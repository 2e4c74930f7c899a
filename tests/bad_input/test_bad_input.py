"""Every mistake of the user's ends with code 2 and one line that says what, where and how to mend it; the disk is left
as it was."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from novarl import cli
from tests.compose.harness import ON_TASK, RL, SFT, finished, lightly, questions, snapshot

GOOD = "".join(json.dumps(row) + "\n" for row in questions())
REWARD = "def reward_fn(messages, answer):\n    return 1.0\n"


@dataclass(frozen=True, slots=True)
class Case:
    """A command in a folder with `files` (and whatever `arrange(folder)` makes), and what must be said of it.

    Words in capitals stand for those of a small run (`SHORT`).
    """

    command: str
    said: str
    files: dict[str, str] = field(default_factory=dict)
    arrange: Callable[[Path], Any] | None = None


def of_rows(text: str, said: str, extra: str = "", command: str = "rl") -> Case:
    """A data file whose content is the mistake."""
    words = "rl LENGTH" if command == "rl" else "sft SFT"
    return Case(f"{words} data=rows.jsonl {extra}".strip(), said, {"rows.jsonl": text})


def row(**columns: Any) -> str:
    return json.dumps(columns) + "\n"


def turns(*messages: Any) -> str:
    return row(messages=list(messages))


ABSENT = "xpu" if torch.backends.mps.is_available() else "mps"
USER = {"role": "user", "content": "hello"}
DATA = {
    "missing file": Case(
        "rl LENGTH data=rowz.jsonl", "rowz.jsonl: no such file (did you mean rows.jsonl?)", {"rows.jsonl": GOOD}
    ),
    "missing held-out file": Case(
        "rl ON_ROWS eval.data=held/out.jsonl", "the directory held does not", {"rows.jsonl": GOOD}
    ),
    "empty file": of_rows("", "rows.jsonl: the file is empty"),
    "only blank lines": of_rows("\n \n", "rows.jsonl: the dataset is empty"),
    "empty folder": Case("rl LENGTH data=.", "data file", {}, lambda folder: None),
    "unknown kind of file": Case("rl LENGTH data=rows.xls", "unsupported file type", {"rows.xls": "x"}),
    "a bad JSON line": of_rows(GOOD + "{'prompt': 1}\n" + GOOD, "rows.jsonl:21: not valid JSON"),
    "a bad JSON line, where": of_rows(GOOD + '{"prompt": \n' + GOOD, "Expecting value at column 12"),
    "a torn last line": of_rows(GOOD[:-9], "rows.jsonl:20: not valid JSON"),
    "a row that is a list": of_rows(GOOD + "[1]\n", "rows.jsonl:21: a row must be an object, not a list"),
    "not UTF-8": Case(
        "rl ON_ROWS",
        "rows.jsonl:2: not valid UTF-8 at byte 14",
        {},
        lambda folder: (folder / "rows.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "b\xff"}\n'),
    ),
    "not gzip": Case("rl LENGTH data=a.jsonl.gz", "a.jsonl.gz: cannot be read completely", {"a.jsonl.gz": "x"}),
    "not parquet": Case("rl LENGTH data=a.parquet", "a.parquet: ", {"a.parquet": "PAR1"}),
    "a missing field": of_rows(GOOD + row(answer=1), "rows.jsonl:21 prompt: is missing"),
    "a null field": of_rows(GOOD + row(prompt=None), "rows.jsonl:21 prompt: is null"),
    "no known columns": of_rows(row(frage="a") + row(frage="b"), "no known format matches the columns: frage"),
    "two formats": of_rows(row(prompt="a", messages=[USER]), "more than one format matches"),
    "a key misspelt": of_rows(GOOD, "no row has that column (did you mean 'prompt'?)", "prompt_key=promt"),
    "no answer column": of_rows(GOOD, "answer_key=solution, but no row has that column", "answer_key=solution"),
    "a number for a prompt": of_rows(
        GOOD + row(prompt=3), "rows.jsonl:21 prompt: must be a string or a list of messages"
    ),
    "an empty prompt": of_rows(GOOD + row(prompt=" "), "rows.jsonl:21 prompt: is empty"),
    "text for messages": of_rows(turns(USER) + row(messages="hi"), "rows.jsonl:2 messages: must be a list of messages"),
    "a number for a message": of_rows(turns(USER) + turns(7), "rows.jsonl:2 messages[0]: must be an object"),
    "a list for a content": of_rows(
        turns(USER) + turns({"role": "user", "content": ["a"]}), "rows.jsonl:2 messages[0].content: must be a string"
    ),
    "an empty message list": of_rows(turns(USER) + turns(), "rows.jsonl:2 messages: is an empty list"),
    "an unknown role": of_rows(
        turns(USER) + turns({"role": "usr", "content": "a"}), "rows.jsonl:2 messages[0].role: unknown role 'usr'"
    ),
    "nothing left to answer": of_rows(
        turns(USER) + turns(USER, {"role": "assistant", "content": "a"}), "rows.jsonl:2 messages[1].role: ends with an"
    ),
    "nothing to learn": of_rows(GOOD + turns(USER), "rows.jsonl:21", command="sft"),
    "no assistant turn": of_rows(turns(USER), "messages: has no assistant turn to train on", command="sft"),
    "completion missing": of_rows(GOOD + row(prompt="a"), "rows.jsonl:21 completion: is missing", command="sft"),
    "a prompt longer than the context": of_rows(
        GOOD + row(prompt="x" * 9000, answer="a"),
        "rows.jsonl:21 prompt: the prompt has 9003 tokens, more than max_length=4092",
    ),
    "longer than the context, whatever max_length says": of_rows(
        row(prompt="x" * 9000), "the prompt has 9003 tokens, more than max_length=4092", "max_length=10000"
    ),
    "an answer as long as the context": of_rows(
        GOOD, "rollout.max_tokens: answers of 4096 tokens leave", "rollout.max_tokens=4096"
    ),
    "a row to imitate longer than the context": of_rows(
        row(prompt="x" * 9000, completion="a"), "rows.jsonl:1 completion: no tokens to train on within", command="sft"
    ),
    "a row longer than allowed": of_rows(
        row(prompt="x" * 50, completion="a"), "more than max_length=20", "max_length=20 on_long=refuse", "sft"
    ),
}

CONFIG = {
    "no such configuration": Case("rl nowhere.yaml", "nowhere.yaml: no such configuration file"),
    "empty configuration": Case("rl a.yaml", "a.yaml: the file is empty", {"a.yaml": ""}),
    "misspelt": Case(
        "rl a.yaml", "a.yaml:2 stepz: unknown key (did you mean steps?)", {"a.yaml": "task: sort\nstepz: 3\n"}
    ),
    "misspelt on the command line": Case("rl ON_TASK optim.lrr=1", "optim.lrr: unknown key (did you mean optim.lr?)"),
    "out of range": Case("rl ON_TASK optim.lr=10", "optim.lr: must be at most 1.0, got 10"),
    "below its range": Case("rl ON_TASK seed=-1", "seed: must be at least 0, got -1"),
    "of the wrong type": Case("rl ON_TASK steps=ten", "steps: must be a whole number, got 'ten'"),
    "task and data": Case(
        "rl ON_TASK data=rows.jsonl", "task=sort and data=rows.jsonl are both given", {"rows.jsonl": GOOD}
    ),
    "steps and epochs": Case(
        "sft task=sort steps=3 epochs=2", "steps=3 and epochs=2.0 both set the length of training"
    ),
    "neither task nor data": Case("rl steps=3", "neither task nor data is given"),
    "data without a reward": Case("rl RL data=rows.jsonl", "reward: data needs a reward", {"rows.jsonl": GOOD}),
    "nothing to compare": Case(
        "rl ON_TASK algo=grpo responses_per_prompt=1", "responses_per_prompt: algo=grpo compares"
    ),
    "no ratio to clip": Case("rl ON_TASK algo=reinforce clip.low=0.1", "clip: algo=reinforce has no ratio to clip"),
    "KL without a place": Case("rl ON_TASK algo=rloo kl.coef=0.1", "kl.type: kl.coef=0.1 needs kl.type"),
    "KL without a weight": Case("rl ON_TASK kl.type=loss", "kl.coef: kl.type=loss with coefficient 0 has no effect"),
    "a deviation without a group": Case(
        "rl ON_TASK algo=rloo adv.norm_std=true", "adv.norm_std: adv.estimator=leave_one_out has no group"
    ),
    "nobody varies": Case(
        "rl ON_TASK algo=reinforce responses_per_prompt=1 dynamic_sampling.enabled=true",
        "dynamic_sampling.enabled: with responses_per_prompt=1",
    ),
    "updates that do not divide": Case(
        "rl ON_TASK algo=dapo epochs_per_rollout=3", "epochs_per_rollout: 4 updates cannot be split evenly into 3"
    ),
    "more updates than answers": Case(
        "rl ON_TASK updates_per_rollout=5", "updates_per_rollout: 4 answers per step are too few for 5"
    ),
    "more updates than answers, by the algorithm": Case(
        "rl ON_TASK algo=dapo prompts_per_rollout=1", "updates_per_rollout: 2 answers per step are too few"
    ),
    "unknown command": Case("rll task=sort", "unknown command 'rll' (did you mean rl?)"),
    "unknown task": Case("rl ON_TASK task=sorts", "task: unknown task 'sorts' (did you mean sort?)"),
    "unknown task, for eval": Case("eval task=srot model=tiny", "task: unknown task 'srot' (did you mean sort?)"),
    "unknown option of a task": Case("rl ON_TASK task_options.dificulty=5", "task_options.dificulty: task=sort has no"),
    "option of a task out of range": Case(
        "rl ON_TASK task_options.difficulty=50", "task_options.difficulty: must be from 4 to 7, not 50"
    ),
    "a number that is no choice": Case(
        "rl ON_TASK rollout.staleness=2", "rollout.staleness: must be 0 or 1, got 2 (use one of these)"
    ),
    "unknown algorithm": Case("rl ON_TASK algo=grop", "algo: unknown algorithm 'grop' (did you mean grpo?)"),
    "algorithm of swapped letters": Case("rl ON_TASK algo=gpro", "algo: unknown algorithm 'gpro' (did you mean grpo?)"),
    "no such device": Case(f"rl ON_TASK device={ABSENT}", "this device is not available"),
}

REWARDS = {
    "unknown reward": Case("rl ON_TASK reward=lenght", "reward: unknown reward 'lenght' (did you mean length?)"),
    "reward file missing": Case("rl ON_TASK reward=mine.py:reward_fn", "mine.py: no such file"),
    "reward function missing": Case(
        "rl ON_TASK reward=mine.py:reward",
        "mine.py: has no function 'reward' (did you mean 'reward_fn'?)",
        {"mine.py": REWARD},
    ),
    "reward file raises": Case(
        "rl ON_TASK reward=mine.py:f", "mine.py:2: import failed with ZeroDivisionError", {"mine.py": "\n1 / 0\n"}
    ),
    "reward file is not Python": Case(
        "rl ON_TASK reward=mine.py:f", "mine.py:1: SyntaxError", {"mine.py": "def f(:\n"}
    ),
    "reward file exits": Case(
        "rl ON_TASK reward=mine.py:f", "mine.py:1: import failed with SystemExit", {"mine.py": "exit()"}
    ),
    "reward file dies": Case(
        "rl ON_TASK reward=mine.py:f",
        "mine.py: import failed: the process exited with code 1",
        {"mine.py": "import os; os._exit(1)"},
    ),
    "reward of the wrong signature": Case(
        "rl ON_TASK reward=mine.py:f",
        "mine.py:1: f(x, answer) has no parameter for the policy's answer",
        {"mine.py": "def f(x, answer): return 1"},
    ),
    "reward is no function": Case("rl ON_TASK reward=mine.py:f", "mine.py: has no function 'f'", {"mine.py": "f = 3"}),
    "environment missing": Case("rl ON_TASK rollout.env_path=env.py", "env.py: no such file"),
    "environment without a reward": Case(
        "rl RL data=rows.jsonl rollout.env_path=env.py",
        "env.py: has no function 'reward_fn'",
        {"rows.jsonl": GOOD, "env.py": "def interact(messages): return []"},
    ),
    "environment without interact": Case(
        "rl ON_TASK rollout.env_path=env.py reward=length", "env.py: has no function 'interact'", {"env.py": REWARD}
    ),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, for cases about models and checkpoints to copy and damage."""
    run = tmp_path_factory.mktemp("trained") / "run"
    finished("rl", *ON_TASK, f"run_dir={run}")
    return run


STEP = "run/checkpoints/step-000001"


def rewritten(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """A JSON file with something changed in it."""
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def torn(name: str) -> Callable[[Path], Any]:
    def cut(folder: Path) -> None:
        file = folder / STEP / name
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    return cut


def another_format(folder: Path) -> None:
    """A whole checkpoint, whose format number is of the future."""
    step = folder / STEP
    rewritten(step / "state.json", lambda state: state.update(format=99))
    digest = hashlib.sha256((step / "state.json").read_bytes()).hexdigest()
    rewritten(step / "MANIFEST", lambda manifest: manifest.update({"state.json": digest}))


def through_transformers(
    change: Callable[[dict[str, Any]], object], file: str = "tokenizer_config.json"
) -> Callable[[Path], None]:
    """The model as one that is not ours (its tokenizer's settings differ), with a file of it changed."""

    def arrange(folder: Path) -> None:
        model = folder / STEP / "model"
        rewritten(model / "tokenizer_config.json", lambda config: config.update(model_max_length=512))
        rewritten(model / file, change)

    return arrange


def saved_nothing(folder: Path) -> None:
    """The run as one that ended before its first checkpoint."""
    shutil.rmtree(folder / "run/checkpoints")
    (folder / "run/summary.json").unlink()
    rewritten(folder / "run/manifest.json", lambda manifest: manifest.pop("saved"))


def without_a_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / STEP / "model" / name).unlink()


TO_RESUME = f"rl ON_TASK resume={STEP}"
MODEL = f"rl ON_TASK model={STEP}/model"
CHECKPOINTS = {
    "no such checkpoint": Case("rl ON_TASK resume=run/checkpoints/step-000007", "step-000007: no such checkpoint"),
    "a run for a checkpoint": Case("rl ON_TASK resume=run", "resume=run: this is a run directory, not a checkpoint"),
    "a word for a checkpoint": Case("rl ON_TASK resume=true", "or resume=auto with the run's run_dir"),
    "torn tensors": Case(
        TO_RESUME, "the checksum of tensors.safetensors does not match", {}, torn("tensors.safetensors")
    ),
    "torn weights": Case(
        TO_RESUME, "the checksum of model/model.safetensors does not match", {}, torn("model/model.safetensors")
    ),
    "torn state": Case(TO_RESUME, "the checksum of state.json does not match", {}, torn("state.json")),
    "torn manifest": Case(TO_RESUME, "its MANIFEST is damaged: not JSON", {}, torn("MANIFEST")),
    "empty manifest": Case(
        TO_RESUME,
        "its MANIFEST does not list its files",
        {},
        lambda folder: (folder / STEP / "MANIFEST").write_text("{}"),
    ),
    "a missing file": Case(
        TO_RESUME, "state.json is missing", {}, lambda folder: (folder / STEP / "state.json").unlink()
    ),
    "of another model": Case(
        f"{TO_RESUME} model=small steps=2", "the checkpoint belongs to model 'tiny', but the run has model=small"
    ),
    "of another model, though finished": Case(f"{TO_RESUME} model=small", "the checkpoint belongs to model"),
    "of another model, found": Case(
        "rl ON_TASK run_dir=run resume=auto model=small", "the checkpoint belongs to model 'tiny'"
    ),
    "a reference that is nowhere": Case(
        "rl ON_TASK algo=grpo kl.coef=0.1 kl.reference=./nope", "kl.reference=./nope: no such directory (use start,"
    ),
    "of another format": Case(TO_RESUME, "has format 99, but this version reads format 1", {}, another_format),
    "of another format, found": Case("rl ON_TASK run_dir=run resume=auto", "has format 99", {}, another_format),
    "of another run": Case(f"{TO_RESUME} run_dir=other", "run_dir=other: the checkpoint belongs to the run"),
    "of another command": Case(f"sft SFT task=sort resume={STEP}", "the existing run is a novarl rl run, but"),
    "of another command, found": Case(
        "sft SFT task=sort run_dir=run resume=auto", "the existing run is a novarl rl run, but"
    ),
    "of another algorithm, found": Case(
        "rl ON_TASK run_dir=run resume=auto algo=grpo steps=2", "has algo=dr_grpo, but this one has algo=grpo"
    ),
    "of another task, found": Case(
        "rl ON_TASK run_dir=run resume=auto task=arithmetic steps=2", "has task=sort, but this one has task=arithmetic"
    ),
    "of another task, though finished": Case(f"{TO_RESUME} task=arithmetic", "has task=sort, but this one has task="),
    "of no reference, found": Case(
        "rl ON_TASK run_dir=run resume=auto kl.type=loss kl.coef=0.1 steps=2", "kept no reference policy"
    ),
    "torn, and no other": Case(
        "rl ON_TASK run_dir=run resume=auto",
        "run_dir=run: no usable checkpoint",
        {},
        lambda folder: [
            (step / "state.json").write_text("") for step in (folder / STEP).parent.iterdir() if not step.is_symlink()
        ],
    ),
    "outside its run": Case(
        "rl ON_TASK resume=elsewhere/there/step",
        "is not inside a run directory",
        {},
        lambda folder: shutil.copytree(folder / STEP, folder / "elsewhere/there/step"),
    ),
    "run_dir holds a run": Case(
        "rl ON_TASK run_dir=run", "run_dir=run: the directory already contains a run (resume it with"
    ),
    "run_dir holds a run, for eval": Case(
        "eval task=sort model=tiny run_dir=run", "the directory already contains a run"
    ),
    "run_dir holds a run that saved nothing": Case(
        "rl ON_TASK run_dir=run",
        "the directory already contains a run (it has no checkpoint: restart it with resume=auto",
        {},
        saved_nothing,
    ),
    "run_dir holds a run without its checkpoints": Case(
        "rl ON_TASK run_dir=run",
        "the directory already contains a run (its checkpoints are missing: restore them",
        {},
        lambda folder: shutil.rmtree(folder / "run/checkpoints"),
    ),
    "run_dir holds a model": Case(
        "rl ON_TASK run_dir=model",
        "run_dir=model: the directory contains config.json",
        {"model/config.json": '{"model_type": "llama"}'},
    ),
    "run_dir holds another program's manifest": Case(
        "rl ON_TASK run_dir=mine",
        "the directory contains manifest.json, which was not written",
        {"mine/manifest.json": "[1]"},
    ),
    "run_dir is a file": Case("rl ON_TASK run_dir=file", "run_dir=file: run_dir is a file", {"file": ""}),
    "run_dir is a file, resuming": Case("rl ON_TASK run_dir=file resume=auto", "run_dir=file: ", {"file": ""}),
    "run_dir lies in a file": Case("rl ON_TASK run_dir=file/run", "run_dir=file/run: cannot write to it", {"file": ""}),
    "run_dir holds somebody's logs": Case(
        "rl ON_TASK run_dir=.", "run_dir=.: the directory contains logs", {"logs/mine.txt": ""}
    ),
    "run_dir holds somebody's logs, resuming": Case(
        "rl ON_TASK run_dir=. resume=auto", "the directory contains logs", {"logs/mine.txt": ""}
    ),
    "run_dir holds somebody's configuration": Case(
        "rl ON_TASK run_dir=.", "contains config.yaml", {"config.yaml": "task: sort"}
    ),
    "a model that is misspelt": Case(
        "rl ON_TASK model=tinny", "model=tinny: no such built-in model (did you mean tiny?)"
    ),
    "a model that nobody has": Case(
        "rl ON_TASK model=nobody/nothing", "nobody/nothing: no causal language model could be"
    ),
    "no such model directory": Case("rl ON_TASK model=./nowhere", "./nowhere: no such directory"),
    "a file for a model": Case("rl ON_TASK model=file", "file: this is a file, not a model directory", {"file": ""}),
    "a run for a model": Case(
        "rl ON_TASK model=run", "no config.json, so it is not a model (did you mean run/checkpoints/"
    ),
    "a model with torn weights": Case(
        MODEL, "model.safetensors: the weights cannot be read", {}, torn("model/model.safetensors")
    ),
    "a model with a torn config": Case(MODEL, "config.json: not valid JSON", {}, torn("model/config.json")),
    "a tokenizer without an end": Case(
        MODEL, "the tokenizer has no eos token", {}, through_transformers(lambda config: config.pop("eos_token"))
    ),
    "a model with a damaged field": Case(
        MODEL,
        f"{STEP}/model/config.json: no causal language model could be loaded: Field 'rms_norm_eps' expected float",
        {},
        through_transformers(lambda config: config.update(rms_norm_eps="1e-5"), "config.json"),
    ),
    "a model of ours with a damaged field": Case(
        MODEL,
        "config.json: rms_norm_eps is 'x' (it must be a number",
        {},
        lambda folder: rewritten(folder / STEP / "model/config.json", lambda config: config.update(rms_norm_eps="x")),
    ),
    "a model with more layers than it says": Case(
        MODEL,
        "tensor 'model.layers.1.input_layernorm.weight' in the weights does not exist in the model",
        {},
        through_transformers(lambda config: config.update(num_hidden_layers=1, layer_types=None), "config.json"),
    ),
    "a model with other shapes than it says": Case(
        MODEL,
        "tensor 'model.layers.0.mlp.down_proj.weight' is ",
        {},
        through_transformers(lambda config: config.update(intermediate_size=64), "config.json"),
    ),
    "a model without a tokenizer": Case(
        MODEL, f"{STEP}/model: the directory contains no tokenizer files (copy tokenizer.json", {}, without_a_tokenizer
    ),
    "to sample from nothing": Case("sample model=tiny", "prompt: no prompt was given"),
}

CASES = {**DATA, **CONFIG, **REWARDS}
LENGTH = (*RL, "reward=length")
SHORT = {"RL": RL, "SFT": SFT, "ON_TASK": ON_TASK, "LENGTH": LENGTH, "ON_ROWS": (*LENGTH, "data=rows.jsonl")}


def assert_refused(
    case: Case, folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the case in `folder`, and check all that is promised of a mistake."""
    for name, text in case.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    if case.arrange is not None:
        case.arrange(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.stdin", (folder / "nothing").open("w+") if "sample" in case.command else None)
    (folder / "nothing").unlink(missing_ok=True)
    words = [word for part in case.command.split() for word in SHORT.get(part, (part,))]
    before, handlers = snapshot(folder), (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    with lightly() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        code = cli.main(words)
    out, err = capfd.readouterr()
    assert (code, out) == (2, ""), err
    assert case.said in err
    assert err.startswith("novarl: ") and err.count("\n") == 1 and "Traceback" not in err
    assert err.endswith(")\n"), "it says how to mend it"
    assert snapshot(folder) == before
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bad_input(
    case: Case, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_refused(case, tmp_path, capfd, monkeypatch)


@pytest.mark.parametrize("case", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_bad_input_about_models_and_runs(
    case: Case, trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(trained, tmp_path / "run", symlinks=True)
    assert_refused(case, tmp_path, capfd, monkeypatch)
