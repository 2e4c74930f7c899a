"""The command line: `novarl COMMAND [CONFIG] [key=value ...]`.

Nothing heavy is imported until a command needs it: `--help` loads neither pydantic nor torch, `explain` no torch.
Exit codes: 0 done; 2 a mistake in the input, or a fault of the environment (a disk, a damaged file, no memory), in one
line on stderr (several keys that cannot be: a line for each); 3 another process of the run is gone; 1 a fault in
NovaRL, with a traceback; 130 stopped by Ctrl-C, SIGTERM or SIGHUP, all saved.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import novarl
from novarl.core import collector
from novarl.core.errors import NovaError, visible
from novarl.core.processor import settle_products, settle_threads

if TYPE_CHECKING:
    from novarl.config.base import Config

COMMANDS: dict[str, str] = {
    "sft": "fine-tune a model on messages or prompts with completions",
    "dpo": "train a model on preferences: pairs of answers, or answers that are each good or bad",
    "rm": "train a reward model on preferences or labels",
    "rl": "train a model by reinforcement on a task or a file of prompts",
    "eval": "score a model on held-out rows: greedy and pass@k, with intervals",
    "sample": "talk to a model",
    "demo": "under two minutes: a language model learns to sort, before your eyes",
    "explain": "say what a configuration would do, in words, without doing it",
    "check": "versions, device, one forward pass",
}

GRAMMAR = """\
CONFIG is a YAML, TOML or JSON file; key=value pairs change it, and later ones win: steps=100 optim.lr=1e-5.
`--some-key value` is read as some_key=value; `--some-key` alone as true, `--no-some-key` as false, and
`--some-key a b` as a list where the key takes one; `--config FILE` names the file.
docs/names.md lists every key, and the names that other projects have for them.
"""

EXAMPLES = """
examples:
  novarl demo
  novarl rl task=sort
  novarl rl configs/arithmetic.yaml algo=grpo steps=200 run_dir=runs/mine resume=auto
  novarl sft data=rows.jsonl prompt_key=question completion_key=answer model=small
  novarl dpo data=pairs.jsonl model=runs/sft/checkpoints/latest/model
  novarl explain configs/grpo.yaml
  torchrun --nproc_per_node=2 -m novarl rl task=sort
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. An error of ours is raised, with a note that asks for a report."""
    words = list(sys.argv[1:] if argv is None else argv)
    _open_standard_streams()
    try:
        return _dispatch(words)
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
        error.add_note(
            f"This is a fault in NovaRL {novarl.__version__}, not in your input: please report it with the lines above."
        )
        raise


def _open_standard_streams() -> None:
    """Open those that whoever started us has closed (`>&-`), to nowhere. Otherwise the next files to be opened, such as
    the run's logs, would get their numbers, and what libraries and rewards print."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as the process lives


def _tell(what: str) -> None:
    """One line on the standard error, which may be gone with its terminal."""
    with contextlib.suppress(OSError):
        print(f"novarl: {visible(what)}", file=sys.stderr)


def _dispatch(words: list[str]) -> int:
    command, rest = (words[0], words[1:]) if words else ("", [])
    if command not in COMMANDS:
        return _front(command, words)
    if any(word in ("-h", "--help") for word in rest):
        print(_help(command), end="")
        return 0
    if command == "explain":
        _explain(rest)
    elif command == "check":
        _check(rest)
    else:
        with collector.resting():
            _run(command, rest)
    return 0


def _front(command: str, words: list[str]) -> int:
    """Whatever does not begin with a command: help, version, nothing, a misspelt one."""
    parser = argparse.ArgumentParser(
        prog="novarl",
        usage="novarl COMMAND [CONFIG] [key=value ...]",
        description="Reinforcement learning for language models.",
        epilog=GRAMMAR + EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"novarl {novarl.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, what in COMMANDS.items():
        commands.add_parser(name, help=what, add_help=False)
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
    from novarl.config.load import peek_kind
    from novarl.config.tree import TREES

    named = rest.pop(0) if rest and rest[0] in TREES else None
    path, overrides = _arguments(rest, named or "rl")
    stated = [("command line", word.removeprefix("kind=")) for word in overrides if word.startswith("kind=")]
    if path and (of_file := peek_kind(path)):
        stated.insert(0, (path, of_file))
    kind = named or (stated[-1][1] if stated else "rl")
    for place, other in stated:
        if other not in TREES:
            raise NovaError(f"kind is {other[:60]!r}", where=place, fix=f"use one of {', '.join(TREES)}")
    for place, other in stated:
        if other != kind:
            what, fix = f"kind is {other!r}, and this is novarl explain {kind}", f"run novarl explain {other}"
            raise NovaError(what, where=f"{place} kind", fix=f"{fix} {path}" if path else fix)
    print(visible(describe(_fill(_load(kind, rest)), ran=_ran(path))), end="")


def _ran(path: str | None) -> list[str]:
    """Of a run whose own config.yaml is explained: what it was computed by when it last began."""
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
        raise NovaError("not JSON", where=events, fix="restore the file from a copy") from None
    if "attention" not in last:
        return []
    return [f"This run began on {last['device']}: attention by {last['attention']}, modules {last['modules']}."]


def _check(rest: list[str]) -> None:
    if rest:
        raise NovaError(f"check takes no arguments, got {rest[0][:60]!r}", where="command line", fix="leave it out")
    settle_products()
    settle_threads(None)
    from novarl import compose

    compose.check()


def _load(kind: str, rest: list[str], preset: Mapping[str, Any] | None = None) -> Config:
    from novarl.config.load import load
    from novarl.config.tree import TREES

    path, overrides = _arguments(rest, kind)
    return load(TREES[kind], path, overrides, preset=preset)


def _arguments(words: list[str], kind: str) -> tuple[str | None, list[str]]:
    """The configuration file, if any, and the overrides, with `--some-key value` turned into `some_key=value`."""
    from novarl.config.flags import arguments
    from novarl.config.tree import TREES

    return arguments(words, TREES[kind])


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


def _help(command: str) -> str:
    if command == "check":
        return f"usage: novarl check\n\n{COMMANDS[command]}\n"
    if command == "explain":
        return (
            "usage: novarl explain [sft|dpo|rm|rl|eval|sample] [CONFIG] [key=value ...]\n\n"
            f"{COMMANDS[command]}\n\n{GRAMMAR}"
        )
    from novarl.config.names_page import key_lines
    from novarl.config.tree import TREES

    listing = key_lines(TREES["rl" if command == "demo" else command])
    head = f"usage: novarl {command} [CONFIG] [key=value ...]\n\n{COMMANDS[command]}\n\n{GRAMMAR}"
    return f"{head}\nkeys, with their defaults:\n{listing}"
