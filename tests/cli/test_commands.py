"""The grammar, the exit codes and what reaches the runs; the runs themselves are faked."""

from __future__ import annotations

import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from novarl import cli, compose
from novarl.config.base import Config
from novarl.config.keys import keys
from novarl.config.load import load
from novarl.config.presets import DEMO
from novarl.config.tree import TREES, EvalConfig, RLConfig, SampleConfig, SFTConfig
from novarl.core.processor import exact_products

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(file for file in (ROOT / "configs").iterdir() if file.is_file())

KERNELS = exact_products()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configurations that the runs were started with."""
    configs: list[Any] = []
    for name in ("run_training", "run_eval", "run_sample"):
        monkeypatch.setattr(compose, name, configs.append)
    monkeypatch.setattr(compose, "check", lambda: configs.append("check"))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return configs


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("rl task=sort steps=3", (RLConfig, ["task=sort", "steps=3"])),
        ("rl --task sort --steps=3", (RLConfig, ["task=sort", "steps=3"])),
        ("rl task=lexical --baseline=ema --ema-beta 0.5", (RLConfig, ["task=lexical", "baseline=ema", "ema_beta=0.5"])),
        ("rl --seed 1 task=sort --group-size 4", (RLConfig, ["task=sort", "seed=1", "group_size=4"])),
        ("sft data=x.jsonl model=small", (SFTConfig, ["data=x.jsonl", "model=small"])),
        ("eval model=m task=sort", (EvalConfig, ["model=m", "task=sort"])),
        ("sample model=m n=2", (SampleConfig, ["model=m", "n=2"])),
    ],
)
def test_words_become_the_configuration_of_a_run(
    words: str, expected: tuple[type[Config], list[str]], asked: list[Any]
) -> None:
    assert cli.main(words.split(" ")) == 0
    assert asked == [load(expected[0], overrides=expected[1])]


def test_demo_is_its_configuration_file(asked: list[Any]) -> None:
    assert cli.main(["demo"]) == cli.main(["rl", str(ROOT / "configs/sort.yaml")]) == cli.main(["demo", "seed=1"]) == 0
    assert asked[0] == asked[1] == load(RLConfig, preset=DEMO)
    assert asked[2].seed == 1


def test_a_value_keeps_its_blanks_and_equal_signs(asked: list[Any]) -> None:
    assert cli.main(["sample", "model=m", "prompt= 1 + 1 = ? -h"]) == 0
    assert asked[0].prompt == " 1 + 1 = ? -h"


def test_a_path_with_an_equal_sign_is_a_path(asked: list[Any], tmp_path: Path) -> None:
    folder = tmp_path / "lr=1e-3"
    folder.mkdir()
    (folder / "config.yaml").write_text("task: sort\n")
    assert cli.main(["rl", str(folder / "config.yaml")]) == 0
    assert asked[0].task == "sort"


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_every_shipped_configuration_says_its_kind_and_runs(file: Path, asked: list[Any]) -> None:
    kind = next(kind for kind in TREES if f"kind: {kind}" in file.read_text() or f'kind = "{kind}"' in file.read_text())
    assert cli.main([kind, str(file), "steps=1"] if kind != "eval" else [kind, str(file)]) == 0
    assert isinstance(asked[0], TREES[kind])
    assert file.read_text().startswith("# "), "it says what it is for"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "usage: novarl"),
        ("rll task=sort", "unknown command 'rll' (did you mean rl?)"),
        ("r task=sort", "unknown command 'r' (did you mean rm or rl or report or runs?)"),
        ("xyzzy", "the commands are sft, dpo, rm, rl, eval"),
        ("rl", "neither task nor data is given"),
        ("rl nowhere.yaml", "nowhere.yaml: no such configuration file"),
        ("rl empty.yaml", "empty.yaml: the file is empty"),
        ("rl broken.json", "broken.json:2: not JSON"),
        ("rl list.yaml", "expected `key: value` lines, found a list"),
        ("rl misspelt.yaml", "misspelt.yaml:2 stepz: unknown key (did you mean steps?)"),
        ("rl sft.yaml", "sft.yaml:1 kind: kind is 'sft', but the command is novarl rl (run novarl sft)"),
        ("rl task=sort steps=-1", "steps: must be at least 1, got -1"),
        ("rl task=sort data=x", "task=sort and data=x are both given"),
        ("rl task=sort --steps", "--steps needs a value"),
        ("rl task=sort good.yaml other.yaml", "the configuration file is already good.yaml"),
        ("sft task=sort algo=grpo", "algo: unknown key"),
        ("eval task=sort", "model: is required"),
        ("check device=cpu", "check takes no arguments"),
        ("explain misspelt.yaml", "did you mean steps?"),
        ("explain demo.yaml", "kind is 'demo'"),
    ],
)
def test_a_mistake_is_one_line_and_code_2_and_nothing_is_written(
    words: str,
    said: str,
    asked: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = {
        "empty.yaml": "",
        "broken.json": '{"task": "sort",\n}',
        "list.yaml": "- a\n",
        "misspelt.yaml": "task: sort\nstepz: 3\n",
        "sft.yaml": "kind: sft\ntask: sort\n",
        "good.yaml": "task: sort\n",
        "demo.yaml": "kind: demo\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert cli.main(words.split(" ") if words else []) == 2
    out, err = capsys.readouterr()
    assert said in err and not out and "Traceback" not in err
    if words:
        assert err.startswith("novarl: ") and err.count("\n") == 1
    assert not asked and {file.name: file.read_text() for file in tmp_path.iterdir()} == files


def test_ctrl_c_is_130_and_says_what_was_saved(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(config: RLConfig) -> None:
        raise KeyboardInterrupt(*(["stopped after step 3; everything is saved"] if config.seed else []))

    monkeypatch.setattr(compose, "run_training", stop)
    assert cli.main(["rl", "task=sort", "seed=1"]) == cli.main(["rl", "task=sort"]) == 130
    assert capsys.readouterr().err == "novarl: stopped after step 3; everything is saved\nnovarl: stopped\n"


def test_a_fault_of_ours_is_code_1_with_a_traceback_and_where_to_go() -> None:
    code = (
        "import novarl.compose as b, novarl.cli as c\n"
        "b.run_training = lambda config: 1 / 0\n"
        "raise SystemExit(c.main(['rl', 'task=sort']))"
    )
    done = python("-c", code)
    assert done.returncode == 1 and "Traceback" in done.stderr and "ZeroDivisionError" in done.stderr
    assert done.stderr.rstrip().splitlines()[-1].startswith("This is a bug in NovaRL")


@pytest.mark.parametrize(
    ("before", "words", "after"),
    [
        ({}, "task=sort", {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "MKL_CBWR": KERNELS}),
        ({}, "task=sort threads=3", {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3", "MKL_CBWR": KERNELS}),
        (
            {"OMP_NUM_THREADS": "5"},
            "task=sort",
            {"OMP_NUM_THREADS": "5", "MKL_NUM_THREADS": "5", "MKL_CBWR": KERNELS},
        ),
        (
            {"OMP_NUM_THREADS": "5", "MKL_CBWR": "AVX512,STRICT"},
            "task=sort threads=1",
            {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MKL_CBWR": "AVX512,STRICT"},
        ),
    ],
)
def test_threads_and_kernels_are_settled_in_the_environment(
    before: dict[str, str], words: str, after: dict[str, str], asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(before))
    assert cli.main(["rl", *words.split(" ")]) == 0
    assert dict(os.environ) == after | {"OPENBLAS_NUM_THREADS": "1"}


def test_the_environment_is_settled_before_torch_loads() -> None:
    code = (
        "import sys, os, novarl.compose as b, novarl.cli as c\n"
        "b.run_training = lambda config: print('torch' in sys.modules, os.environ['OMP_NUM_THREADS'])\n"
        "c.main(['rl', 'task=sort', 'threads=3'])"
    )
    assert python("-c", code).stdout == "False 3\n"


def test_check_and_version(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check"]) == 0 and asked == ["check"]
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("novarl 0.")


def test_help_needs_neither_pydantic_nor_torch() -> None:
    heavy = "sorted({'torch', 'pydantic', 'yaml', 'numpy', 'transformers', 'rich'} & set(sys.modules))"
    done = python("-c", f"import sys; from novarl.cli import main; code = main(['--help']); print(code, {heavy})")
    assert done.stdout.endswith("0 []\n") and done.stdout.startswith("usage: novarl")
    assert all(f"    {command} " in done.stdout for command in cli.COMMANDS)


def test_help_is_quick() -> None:
    """What a start takes is what it imports: a hundred small modules of Python's own, beside those of any program."""
    code = "import sys; bare = set(sys.modules); from novarl.cli import main; main(['--help'])"
    done = python("-c", f"{code}; print(len(set(sys.modules) - bare))")
    assert 0 < int(done.stdout.splitlines()[-1]) < 100
    theirs = python(
        "-c", f"{code}; print(sorted({{n.partition('.')[0] for n in sys.modules}} - sys.stdlib_module_names))"
    )
    assert "'novarl'" in theirs.stdout.splitlines()[-1] and "numpy" not in theirs.stdout


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_of_a_command_lists_its_keys(command: str, asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "task=sort", "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: novarl {command}") and cli.COMMANDS[command] in out and not asked
    if command in TREES:
        for name in TREES[command].model_fields:
            assert f"\n  {name}" in out


@pytest.mark.parametrize("command", ["", *cli.COMMANDS])
def test_help_fits_a_terminal_of_80_columns_and_has_examples(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([*([command] if command else []), "--help"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80 and "\nexamples:\n  novarl " in out
    for kind in {command} & set(TREES):
        text = " ".join(out.split())
        for key in keys(TREES[kind]).values():
            assert f"\n  {key.path}" in out and key.meaning
            assert all(word in text for word in key.meaning.replace("`", "").partition(". ")[0].split())


def test_examples_of_the_help_are_valid(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for command, examples in cli.EXAMPLES.items():
        for words in (words for words in examples if command in (*TREES, "demo")):
            assert cli.main(shlex.split(words)) == 0, words
    assert len(asked) == sum(len(cli.EXAMPLES[name]) for name in (*TREES, "demo"))


def test_help_of_one_section_or_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rl", "--help", "optim"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("optim: AdamW") and "Takes: constant, linear, cosine. [constant]" in " ".join(out.split())
    shown = {line.split()[0] for line in out.splitlines() if line.startswith("  ") and line[2] != " "}
    assert shown == {path for path in keys(TREES["rl"]) if path.startswith("optim.")}
    assert cli.main(["demo", "-h", "kl.coef"]) == 0
    assert capsys.readouterr().out.startswith("  kl.coef ")
    assert cli.main(["rl", "--help", "optin"]) == 2
    assert "no key or section is called 'optin' (did you mean optim?)" in capsys.readouterr().err


def test_help_of_a_command_needs_no_torch() -> None:
    code = "import sys; from novarl.cli import main; main(['rl', '-h']); print('torch' in sys.modules)"
    assert python("-c", code).stdout.endswith("False\n")


def test_python_m_novarl_is_the_same_command() -> None:
    done = python("-m", "novarl", "rl", "task=sort", "stepz=1")
    expected = "novarl: command line stepz: unknown key (did you mean steps?)\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_streams_that_the_shell_closed(closed: str, tmp_path: Path) -> None:
    words = "task=sort steps=1 warmup=0 eval.n=0 prompts_per_rollout=1 rollout.staleness=1 run_dir=here"
    done = subprocess.run(f"{sys.executable} -m novarl rl {words} {closed}", shell=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0 and (tmp_path / "here" / "summary.json").exists()


def test_ctrl_c_waits_for_whole_imports() -> None:
    """torch goes on with half of numpy where one comes while it is imported."""
    code = (
        "import os, signal, sys, novarl.compose as b, novarl.cli as c\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in what a script starts with &
        "class Watch:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'numpy.linalg': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Watch())\n"
        "status = c.main(['rl', 'task=sort', 'steps=1'])\n"
        "import numpy\n"
        "print(status, numpy.linalg.__name__, 'novarl.compose.rl' in sys.modules)"
    )
    done = python("-c", code)
    assert (done.stdout, done.stderr) == ("130 numpy.linalg True\n", "novarl: stopped\n")


def test_ends_while_libraries_are_being_mapped_are_clean() -> None:
    """A mistake in the command line is found while a second thread maps torch's libraries."""
    for _ in range(5):
        done = python("-m", "novarl", "rl", "nonsense")
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", "epochs=3 steps_per_epoch=8 batch_size=4 max_new_tokens=75 kl_coef=0.1 seed=42 warmup=100"),
        (
            "--epochs 2 --steps_per_epoch 6 --batch_size 2 --max_new_tokens 10 "
            "--learning_rate 1e-4 --kl_coef 0 --seed 1 --device cpu",
            "steps=12 prompts_per_rollout=2 rollout.max_tokens=50 optim.lr=1e-4 kl.coef=0 seed=1 device=cpu warmup=100",
        ),
        (
            "--epochs 1 warmup=7 run_dir=runs/x",
            "steps=8 prompts_per_rollout=4 max_new_tokens=75 kl_coef=0.1 seed=42 warmup=7 run_dir=runs/x",
        ),
        (
            "--model some/folder",
            "epochs=3 steps_per_epoch=8 batch_size=4 max_new_tokens=15 kl_coef=0.1 seed=42 model=some/folder",
        ),
    ],
)
def test_train_py_takes_the_kits_flags(
    flags: str, expected: str, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *flags.split()])
    with pytest.raises(SystemExit) as done:
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    assert done.value.code == 0
    config = load(RLConfig, overrides=["task=sentiment", "algo=ppo_clip", *expected.split()])
    assert asked == [config]


def test_check_runs_a_forward_pass(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert cli.main(["check"]) == 0
        assert "forward pass" in capsys.readouterr().out
