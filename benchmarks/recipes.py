"""Each recipe and the library, run freely, end at the same held-out score: `make bench-recipes`.

A recipe runs by its own command line. The library runs the row of its table that the recipe tells of: from the same
start, on the same rows, with the recipe's own arguments as its settings. Both are judged by the recipe. `tests/recipes`
shows that their updates are equal; this shows that nothing around them differs: prompts, sampling, masks, rewards, the
number of updates. So a run of the library with something broken must not pass.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from types import ModuleType
from typing import Any

import yaml

from benchmarks import report
from benchmarks.learning import STUDENT
from benchmarks.recipe_twins import TWINS, Row, Twin
from novarl import cli

RECIPES = report.ROOT / "recipes"
WIDEST = 0.2
"""An interval of the difference that reaches further than this says too little to pass."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [twin.recipe for twin in TWINS]
    parser.add_argument("--recipe", nargs="+", default=names, choices=names)
    parser.add_argument("--seeds", type=int, default=3, choices=STUDENT)
    parser.add_argument("--runs", type=Path, help="a folder to keep runs in; those that it holds are not run again")
    parser.add_argument("--at-once", type=int, default=2, help="runs side by side, each with OMP_NUM_THREADS threads")
    arguments = parser.parse_args()
    began, chosen = time.perf_counter(), [twin for twin in TWINS if twin.recipe in arguments.recipe]
    with (
        tempfile.TemporaryDirectory() as scratch,
        ProcessPoolExecutor(arguments.at_once, mp_context=get_context("spawn")) as pool,
    ):
        home, seeds = arguments.runs or Path(scratch), range(arguments.seeds)
        starts = {twin.start: twin.task for twin in chosen}
        list(pool.map(partial(begin, home), [(*one, seed) for seed in seeds for one in starts.items()]))
        wanted = list(product(seeds, arguments.recipe, ("recipe", "library")))
        found = list(pool.map(partial(run, home), [*wanted, *product((0,), arguments.recipe, ("fault",))]))
    verdicts = [judge(twin, [one for one in found if one["recipe"] == twin.recipe]) for twin in chosen]
    body = (
        "Each recipe is run by its own command line, and the library from the same start, on the same rows, with the "
        "same settings. The score is the recipe's own, on held-out problems, the mean over "
        f"{arguments.seeds} seeds. Difference: library minus recipe, with Student's 95 % interval over seeds, at least "
        "as wide as the number of judged answers implies. Same: the interval contains 0 and reaches no further than "
        f"{WIDEST}. Last column: the difference with a fault in the library (all advantages 0; demonstrations of other "
        "rows; preferences swapped), which must lie outside that interval placed around 0.\n\n"
        + report.table(
            ["recipe", "command line", "start", "recipe", "library", "difference", "95 % interval", "same", "broken"],
            [one["cells"] for one in verdicts],
        )
    )
    met = {one["recipe"]: one["met"] for one in verdicts}
    seconds = time.perf_counter() - began
    report.write(
        "recipes", "Recipes and library reach the same score", body, {"runs": found, "met": met, "seconds": seconds}
    )
    return 0 if all(met.values()) else 1


def module_of(name: str) -> ModuleType:
    """A recipe as a module. They are no package."""
    if str(RECIPES) not in sys.path:
        sys.path.insert(0, str(RECIPES))
    return import_module(name)


def arguments_of(twin: Twin, seed: int) -> Namespace:
    """The recipe's arguments in its runs of a seed."""
    words = f"{twin.flags} {twin.task} {twin.judged} --seed {seed}".split()
    found: Namespace = module_of(twin.recipe).parse_args(words)
    return found


def play(name: str, flags: str, **more: object) -> tuple[float, float]:
    """What `python recipes/NAME.py flags` measures before and after."""
    words = [word for key, value in more.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    with redirect_stdout(None):
        found: tuple[float, float] = module_of(name).main([*flags.split(), *words])
    return found


def begin(home: Path, one: tuple[str, str, int]) -> None:
    """The model that the runs of a seed go on from: the recipe's own, after its warm-up if it has one."""
    kind, flags, seed = one
    folder = home / f"start-{kind}-{seed}"
    if not (folder / "tokenizer_config.json").is_file():  # the last thing that is saved
        play(kind, f"{flags} --num-epochs 0", seed=seed, output_dir=folder)


def prepare(home: Path, twin: Twin, seed: int, who: str) -> None:
    """The library's data and configuration."""
    start, module = home / f"start-{twin.start}-{seed}", module_of(twin.recipe)
    args = arguments_of(twin, seed)
    with redirect_stdout(None):
        rows = twin.rows(module, args, start)
    settings = {"kind": twin.command, "model": str(start), "seed": seed, "save_every": None, **twin.settings(args)}
    settings["log"] = {"tensorboard": False, "console": False}
    if "epochs" not in settings:
        settings["steps"] = len(rows) // args.batch_size
    data = home / f"{twin.recipe}-{seed}-{who}.jsonl"
    said = broken(rows) if who == "fault" and twin.command != "rl" else rows
    data.write_text("".join(json.dumps(row) + "\n" for row in said))
    # Held-out rows of its own, or some of these would be set aside.
    settings |= {"data": str(data), "eval": settings["eval"] | {"data": str(data)}}
    data.with_suffix(".yaml").write_text(yaml.safe_dump(settings))


def broken(rows: Sequence[Row]) -> list[Row]:
    """Preferences the wrong way round, or each question with the answer to another one."""
    if "chosen" in rows[0]:
        return [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
    following = [*rows[1:], rows[0]]
    return [
        {"messages": [row["messages"][0], other["messages"][1]]} for row, other in zip(rows, following, strict=True)
    ]


def run(home: Path, one: tuple[int, str, str]) -> dict[str, Any]:
    """One run and its held-out score."""
    seed, name, who = one
    twin = next(twin for twin in TWINS if twin.recipe == name)
    began, folder, start = time.perf_counter(), home / f"{name}-{seed}-{who}", home / f"start-{twin.start}-{seed}"
    record = folder.with_suffix(".json")
    if record.is_file():
        known: dict[str, Any] = json.loads(record.read_text())
        return known
    found: dict[str, Any] = {"recipe": name, "seed": seed, "who": who}
    if who == "recipe":
        flags = f"{twin.flags} {twin.task} {twin.judged}"
        found["before"], found["score"] = play(name, flags, seed=seed, model_id=start, output_dir=folder)
    else:
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was broken off
        prepare(home, twin, seed, who)
        library(twin.command, f"{folder}.yaml", f"run_dir={folder}", credit=who != "fault" or twin.command != "rl")
        model = folder / "checkpoints" / "latest" / "model"
        if twin.command == "rm":
            as_classifier(model)
        found["score"] = score(twin, model, seed)
    found["seconds"] = time.perf_counter() - began
    record.write_text(json.dumps(found))
    print(json.dumps(found), flush=True)
    return found


def library(*words: str, credit: bool) -> None:
    """`novarl words...`; without `credit` all advantages are 0, which takes a process of its own."""
    if credit:
        with redirect_stdout(None):
            code = cli.main(words)
    else:
        code = subprocess.run(
            [sys.executable, "-m", "benchmarks.without_credit", *words], check=False, cwd=report.ROOT
        ).returncode
    if code:
        raise RuntimeError(f"novarl {' '.join(words)} ended with {code}")


def score(twin: Twin, model: Path, seed: int) -> float:
    """What the recipe says of a model."""
    import torch

    module = module_of(twin.recipe)
    torch.manual_seed(seed)
    with redirect_stdout(None):
        found: float = module.evaluate(*module.load(str(model)), arguments_of(twin, seed))
    return found


def as_classifier(model: Path) -> None:
    """Put the library's head where transformers' reward models have theirs."""
    from safetensors.torch import load_file, save_file

    from novarl.models.heads import VALUE_HEAD

    tensors = load_file(model / "model.safetensors")
    tensors["score.weight"] = load_file(model / VALUE_HEAD)["weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def judge(twin: Twin, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The row of the report, and whether its goal is met."""

    def of(who: str, key: str = "score") -> list[float]:
        return [run[key] for run in sorted(runs, key=lambda run: run["seed"]) if run["who"] == who]

    recipe, library = of("recipe"), of("library")
    differences = [ours - theirs for ours, theirs in zip(library, recipe, strict=True)]
    count, difference = len(differences), fmean(differences)
    share = (fmean([*recipe, *library]) * twin.answers + 1) / (twin.answers + 2)
    sampling = 1.96 * math.sqrt(2 * max(share * (1 - share), 0.0) / (twin.answers * count))
    over_seeds = STUDENT[count] * stdev(differences) / math.sqrt(count) if count > 1 else 0.0
    slack, wrong = max(sampling, over_seeds), of("fault")[0] - recipe[0]
    met = abs(difference) <= slack <= WIDEST < abs(wrong)
    interval = f"{difference - slack:.3f} to {difference + slack:.3f}"
    line = f"`{' '.join(f'{twin.recipe}.py {twin.flags} {twin.task}'.split())}`"
    cells = [twin.recipe, line, fmean(of("recipe", "before")), fmean(recipe), fmean(library), difference, interval]
    return {"recipe": twin.recipe, "met": met, "cells": [*cells, "yes" if met else "NO", wrong]}


if __name__ == "__main__":
    raise SystemExit(main())
