"""The command line: `novarl COMMAND [CONFIG] [key=value ...]`.

Heavy modules are imported only when a command needs them: `novarl --help` loads neither pydantic nor torch, `explain`
does not load torch.

Exit codes: 0 success; 1 a bug in NovaRL, with a traceback; 2 invalid input or a problem of the environment (full disk,
damaged file, out of memory), one line per error on stderr; 3 another process of the run is gone; 130 stopped by Ctrl-C,
SIGTERM or SIGHUP, with everything saved.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from novarl.core import collector
from novarl.core.errors import NovaError, visible
from novarl.core.processor import settle_products, settle_threads
from novarl.core.version import VERSION

if TYPE_CHECKING:
    from novarl.config.base import Config

COMMANDS: dict[str, str] = {
    "sft": "fine-tune a model on chat messages or prompts with completions",
    "dpo": "train a model on preference pairs or labeled answers",
    "rm": "train a reward model on preference pairs or labeled answers",
    "rl": "train a model with reinforcement learning on a task or your prompts",
    "eval": "score a model on held-out rows: greedy decoding and pass@k",
    "sample": "generate answers to prompts",
    "demo": "train a small model to sort letters, in under two minutes",
    "watch": "show runs in the browser while they grow: curves, samples, alerts",
    "report": "write a run as one HTML file",
    "runs": "list the runs in a directory: status, steps, scores",
    "show": "summarize a run, also while it grows and after it was killed",
    "compare": "is one run better than another, and how many more samples would settle it",
    "alerts": "print the alerts and findings of a run",
    "explain": "describe what a configuration would do, without running it",
    "check": "print versions and device, and run one forward pass",
    "import": "turn another library's files into a run directory",
}

VIEWERS = ("runs", "show", "compare", "alerts")
"""Commands that only read run directories, with arguments of their own."""

GRAMMAR = """\
CONFIG is a YAML, TOML or JSON file. key=value pairs override it; the last one
wins. `--some-key value` means some_key=value, `--some-key` alone means true,
`--no-some-key` means false, `--some-key a b` is a list, and `--config FILE`
names the file. docs/names.md lists every key and the names that other libraries
use for it.
"""

EXAMPLES: dict[str, tuple[str, ...]] = {
    "": ("demo", "rl task=sort", "rl --help optim", "explain task=sort algo=ppo"),
    "sft": (
        "sft task=sort",
        "sft data=rows.jsonl prompt_key=question completion_key=answer",
        "sft data=chat.jsonl model=Qwen/Qwen2.5-0.5B-Instruct epochs=2",
    ),
    "dpo": ("dpo data=pairs.jsonl model=runs/sft/checkpoints/latest/model", "dpo data=labels.jsonl loss=kto"),
    "rm": ("rm data=pairs.jsonl", "rm data=labels.jsonl loss=bce"),
    "rl": (
        "rl task=sort",
        "rl data=rows.jsonl reward=mine.py:reward_fn model=small",
        "rl configs/arithmetic.yaml algo=grpo run_dir=runs/x resume=auto",
    ),
    "eval": (
        "eval task=sort model=runs/x/checkpoints/latest/model eval.k=4",
        "eval data=test.jsonl reward=math model=Qwen/Qwen2.5-0.5B-Instruct",
    ),
    "sample": (
        "sample model=runs/x/checkpoints/latest/model",
        "sample model=small prompt='Once upon a time' sampling.temperature=0.7",
    ),
    "demo": ("demo", "demo seed=1 steps=48"),
    "watch": ("watch", "watch runs/x runs/y --port 9000"),
    "report": ("report runs/latest", "report runs/x --out x.html"),
    "runs": ("runs", "runs experiments --json"),
    "show": ("show runs/latest", "show runs/x --all"),
    "compare": (
        "compare runs/a runs/b",
        "compare runs/grpo-* runs/ppo-*",
        "compare runs/a0,runs/a1 runs/b0,runs/b1 --detect 0.02",
        "compare runs/a",
    ),
    "alerts": ("alerts runs/latest",),
    "explain": ("explain task=sort algo=ppo", "explain sft configs/sft.yaml epochs=2"),
    "check": ("check",),
    "import": (
        "import trl-output",
        "import rollouts.jsonl runs/x prompt=question text=answer reward=score",
    ),
}


def main(argv: Sequence[str] | None = None, *, program: str | None = None) -> int:
    """Run one command and return the exit code. `program` stands for `novarl COMMAND` in the usage. An unexpected
    exception is re-raised, with a request to report it."""
    words = list(sys.argv[1:] if argv is None else argv)
    _open_standard_streams()
    try:
        return _dispatch(words, program)
    except NovaError as error:
        for mistake in error.each:
            _tell(str(mistake))
        return error.code
    except KeyboardInterrupt as stop:
        _tell(str(stop) or "stopped")
        return 130
    except Exception as error:
        from novarl.core.surroundings import environment_fault

        if (fault := environment_fault(error)) is not None:
            _tell(str(fault))
            return fault.code
        error.add_note(f"This is a bug in NovaRL {VERSION}, not in your input. Please report it with the lines above.")
        raise


def _open_standard_streams() -> None:
    """Open standard streams that the caller has closed (`>&-`) on /dev/null. Otherwise the next files to be opened,
    such as the run's logs, would get their numbers and everything that libraries and rewards print."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as the process lives


def _tell(message: str) -> None:
    """Print one line on stderr, which may be gone with its terminal."""
    with contextlib.suppress(OSError):
        print(f"novarl: {visible(message)}", file=sys.stderr)


def _dispatch(words: list[str], program: str | None) -> int:
    command, rest = (words[0], words[1:]) if words else ("", [])
    if command not in COMMANDS:
        return _without_command(command, words)
    if command in ("watch", "report"):
        from novarl.dashboard.commands import main as show

        return show(command, rest, COMMANDS[command], _examples(command))
    flag = next((at for at, word in enumerate(rest) if word in ("-h", "--help")), None)
    if flag is not None:
        print(_help(command, rest[flag + 1 : flag + 2], program), end="")
        return 0
    if command in VIEWERS:
        _view(command, rest)
    elif command == "explain":
        _explain(rest)
    elif command == "check":
        _check(rest)
    elif command == "import":
        from novarl.integrations.commands import run_import

        run_import(rest)
    else:
        with collector.resting():
            _run(command, rest)
    return 0


def _without_command(command: str, words: list[str]) -> int:
    """Handle `--help`, `--version`, an empty command line and unknown commands."""
    parser = argparse.ArgumentParser(
        prog="novarl",
        usage="novarl COMMAND [CONFIG] [key=value ...]",
        description="Reinforcement learning for language models.",
        epilog=f"{GRAMMAR}\n{_examples('')}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"novarl {VERSION}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, meaning in COMMANDS.items():
        commands.add_parser(name, help=meaning, add_help=False)
    if not words:
        parser.print_help(sys.stderr)
        return 2
    if command in ("-h", "--help", "help", "--version"):
        try:
            parser.parse_args(["--help" if command == "help" else command])
        except SystemExit as done:
            return int(done.code or 0)
    import difflib

    begun = [name for name in COMMANDS if command and name.startswith(command)]
    near = begun or difflib.get_close_matches(command, COMMANDS, 1)
    fix = f"did you mean {' or '.join(near)}?" if near else f"the commands are {', '.join(COMMANDS)}"
    raise NovaError(f"unknown command {command[:60]!r}", where="command line", fix=fix)


def _run(command: str, rest: list[str]) -> None:
    from novarl.config.preload import preload

    settle_products()
    preload()
    from novarl.config.presets import DEMO

    config = _load("rl" if command == "demo" else command, rest, DEMO if command == "demo" else None)
    settle_threads(config.threads)
    from novarl import compose

    runs: dict[str, Callable[[Any], object]] = {"eval": compose.run_eval, "sample": compose.run_sample}
    runs.get(config.kind, compose.run_training)(config)


def _explain(rest: list[str]) -> None:
    from novarl.config.describe import describe
    from novarl.config.flags import arguments
    from novarl.config.load import peek_kind
    from novarl.config.tree import TREES

    named = rest.pop(0) if rest and rest[0] in TREES else None
    path, overrides = arguments(rest, TREES[named or "rl"])
    stated = [("command line", word.removeprefix("kind=")) for word in overrides if word.startswith("kind=")]
    if path and (of_file := peek_kind(path)):
        stated.insert(0, (path, of_file))
    kind = named or (stated[-1][1] if stated else "rl")
    for place, other in stated:
        if other not in TREES:
            raise NovaError(f"kind is {other[:60]!r}", where=place, fix=f"use one of {', '.join(TREES)}")
    for place, other in stated:
        if other != kind:
            what, fix = f"kind is {other!r}, but the command is novarl explain {kind}", f"run novarl explain {other}"
            raise NovaError(what, where=f"{place} kind", fix=f"{fix} {path}" if path else fix)
    print(visible(describe(_fill(_load(kind, rest)), ran=_ran(path))), end="")


def _ran(path: str | None) -> list[str]:
    """If `path` is the config.yaml of a run: the device and attention it used when it last started."""
    import json

    folder, name = os.path.split(os.path.expanduser(path or ""))
    events = os.path.join(folder, "events.jsonl")
    if name != "config.yaml" or not os.path.isfile(events):
        return []
    with open(events, encoding="utf-8") as lines:
        begun = [line for line in lines if '"kind": "start"' in line and line.endswith("\n")]
    try:
        last = json.loads(begun[-1]) if begun else {}
    except ValueError:
        raise NovaError("not valid JSON", where=events, fix="restore the file from a copy") from None
    if "attention" not in last:
        return []
    return [f"This run started on {last['device']} with {last['attention']} attention and {last['modules']} modules."]


def _view(command: str, rest: list[str]) -> None:
    from novarl.observe.terminal.commands import parser_of, show, view

    parser = parser_of(command, COMMANDS[command], _examples(command))
    show(view(parser, command, rest, _defaults))


def _defaults(kind: str) -> dict[str, Any] | None:
    """The default of every setting of a kind of run; None if there is no such kind."""
    from novarl.config.keys import keys
    from novarl.config.tree import TREES

    return {path: key.default for path, key in keys(TREES[kind]).items()} if kind in TREES else None


def _check(rest: list[str]) -> None:
    if rest:
        raise NovaError(f"check takes no arguments, got {rest[0][:60]!r}", where="command line", fix="remove it")
    settle_products()
    settle_threads(None)
    from novarl import compose

    compose.check()


def _load(kind: str, rest: list[str], preset: Mapping[str, Any] | None = None) -> Config:
    from novarl.config.flags import arguments
    from novarl.config.load import load
    from novarl.config.tree import TREES

    path, overrides = arguments(rest, TREES[kind])
    return load(TREES[kind], path, overrides, preset=preset)


def _fill(config: Config) -> Config:
    """The configuration with every null that the algorithm and the task decide."""
    from novarl.compose.preference_plan import decided
    from novarl.compose.resolve import resolve_rl, resolve_sft
    from novarl.config.load import fill
    from novarl.config.preference import DPOConfig, RMConfig
    from novarl.config.tree import RLConfig, SFTConfig

    if isinstance(config, SFTConfig):
        return fill(config, {"optim.lr": resolve_sft(config).lr})
    if isinstance(config, DPOConfig | RMConfig):
        return fill(config, decided(config))
    if not isinstance(config, RLConfig):
        return config
    return fill(config, resolve_rl(config).values)


def _examples(command: str) -> str:
    return "".join(["examples:\n", *(f"  novarl {words}\n" for words in EXAMPLES[command])])


def _help(command: str, topic: list[str], program: str | None) -> str:
    """The help of a command; with a `topic`, only that section or key of its configuration."""
    if command in VIEWERS:
        from novarl.observe.terminal.commands import parser_of

        return parser_of(command, COMMANDS[command], _examples(command)).format_help()
    from novarl.config.help import key_lines, section_lines
    from novarl.config.tree import TREES

    tree = TREES.get("rl" if command == "demo" else command)
    if topic and tree is not None:
        return section_lines(tree, topic[0])
    usage = {
        "check": "",
        "explain": " [COMMAND] [CONFIG] [key=value ...]",
        "import": " SOURCE [OUT] [field=column ...]",
    }
    words = usage.get(command, " [CONFIG] [key=value ...]")
    head = f"usage: {program or f'novarl {command}'}{words}\n\n{COMMANDS[command]}\n"
    parts = [head, _examples(command), *([GRAMMAR] if command not in ("check", "import") else [])]
    if tree is not None:
        parts += [f"`novarl {command} --help SECTION` shows the full descriptions of a section.\n"]
        parts += [key_lines(tree)]
    return "\n".join(parts)
