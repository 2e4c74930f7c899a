"""The dashboard with many large runs: how long until the page shows curves, and until a new step is on the page.

python -m benchmarks.web --runs 20 --steps 100000 --gigabytes 2

The runs are synthetic. Their rollouts are copies of a few steps under other names, in files of their own.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from novarl.observe.writer import RunWriter

METRICS = [
    *("reward_mean", "reward_std", "advantage_std", "kl", "kl_mean", "kl_to_ref", "entropy", "mismatch_mean"),
    *("grad_norm", "lr", "total_loss", "policy_loss", "kl_loss", "clip_fraction", "ratio_mean", "ratio_max"),
    *("length_mean", "length_max", "truncated_fraction", "tokens"),
]
SAID = """document.querySelector('[data-metric="reward_mean"] .said')?.textContent ?? ''"""


def make_runs(folder: Path, runs: int, steps: int, gigabytes: float) -> None:
    """Write the runs; nothing in them is measured."""
    values = random.Random(0)
    text = metrics_text(steps, values)
    for number in range(runs):
        path = folder / f"run-{number:02d}"
        run = RunWriter(path, writer="benchmark", steps=steps + 1000, config={"seed": number})
        (path / "metrics.jsonl").write_text(text)
        run.rollouts(1, answers(values))
        source = path / "rollouts/step-000001.jsonl"
        for step in range(2, max(2, int(gigabytes * 1e9 / runs / source.stat().st_size)) + 1):
            shutil.copyfile(source, path / f"rollouts/step-{step:06d}.jsonl")
    size = sum(file.stat().st_size for file in folder.rglob("*.jsonl"))
    print(f"{runs} runs x {steps:,} steps, {size / 1e9:.2f} GB of metrics and rollouts", flush=True)


def metrics_text(steps: int, values: random.Random) -> str:
    lines = []
    for step in range(1, steps + 1):
        row: dict[str, Any] = {"schema": 1, "phase": "rl", "step": step}
        row |= {name: values.random() + step / steps for name in METRICS}
        lines.append(json.dumps(row) + "\n")
    return "".join(lines)


def answers(values: random.Random, groups: int = 16, size: int = 8, tokens: int = 40) -> list[dict[str, Any]]:
    rows = []
    for group in range(groups):
        for index in range(size):
            columns: dict[str, list[Any]] = {"tokens": list(range(tokens)), "pieces": [" word"] * tokens}
            for name in ("advantages", "logp", "old_logp", "behavior_logp", "ref_logp", "entropy", "loss"):
                columns[name] = [values.gauss(0, 1) for _ in range(tokens)]
            row = {"prompt_id": f"p{group}", "prompt": f"question {group}", "text": " word" * tokens, "reward": 1.0}
            rows.append({**row, "group": group, "index": index, "columns": columns})
    return rows


@contextmanager
def served(folder: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "novarl", "watch", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
        assert found
        yield found[0]
        process.terminate()


def first_paint(browser: Any, address: str) -> tuple[Any, float, float, float]:
    """A page, and the seconds to its first paint, to the list of runs, and to the first curves."""
    page = browser.new_page()
    page.set_default_timeout(120_000)
    begun = time.perf_counter()
    page.goto(address, wait_until="commit")
    page.wait_for_selector("#runs li")
    listed = time.perf_counter() - begun
    wait(page, f"/[0-9]/.test({SAID})")
    drawn = time.perf_counter() - begun
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    return page, paint / 1000, listed, drawn


def wait(page: Any, condition: str) -> None:
    """Until an expression holds on the page, at most two minutes."""
    until = time.perf_counter() + 120
    while not page.evaluate(condition):
        if time.perf_counter() > until:
            raise SystemExit(f"not within two minutes: {condition}")
        time.sleep(0.02)


def update_time(page: Any, folder: Path, step: int, value: float) -> float:
    """Seconds from a line in metrics.jsonl until its value, which no other line has, is on the page."""
    row = {"schema": 1, "phase": "rl", "step": step} | dict.fromkeys(METRICS, 1.0) | {"reward_mean": value}
    begun = time.perf_counter()
    with (folder / "run-00/metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    wait(page, f"({SAID}).includes('{value:g}')")
    return time.perf_counter() - begun


def measure(folder: Path, runs: int, steps: int) -> None:
    from playwright.sync_api import sync_playwright

    where = shutil.which("chromium") or shutil.which("chromium-browser")
    every = "&".join(f"runs=run-{number:02d}" for number in range(runs))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=where, args=["--no-sandbox"])
        for shown, view in ((1, "run=run-00"), (runs, f"run=run-00&{every}")):
            print(f"\ncurves of {shown} of {runs} runs")
            with served(folder) as address:
                steps = measure_one(browser, f"{address}/#", view, folder, steps)
        browser.close()


def measure_one(browser: Any, address: str, view: str, folder: Path, steps: int) -> int:
    """Print the times of one view on a fresh server; returns the steps that run-00 now has."""
    page, paint, listed, drawn = first_paint(browser, f"{address}/curves?{view}")
    print(f"  fresh server: first paint {paint:.2f} s, list of runs {listed:.2f} s, curves {drawn:.2f} s")
    begun = time.perf_counter()
    wait(page, "document.querySelector('.curves .tools [role=status]').textContent === ''")
    print(f"  exact curves, after samples of them: {time.perf_counter() - begun:.1f} s later")
    page.close()
    page, paint, listed, drawn = first_paint(browser, f"{address}/curves?{view}")
    print(f"  opened again: first paint {paint:.2f} s, list of runs {listed:.2f} s, curves {drawn:.2f} s")
    times = [update_time(page, folder, steps + number, 3 + number / 100 + steps % 7) for number in range(1, 10)]
    print(f"  a new step is on the page after {statistics.median(times):.2f} s (most {max(times):.2f} s)")
    page.close()
    page = browser.new_page()
    begun = time.perf_counter()
    page.goto(f"{address}/samples?run=run-00&step=20")
    page.wait_for_selector(".answer .t")
    print(f"  answers of a step: {time.perf_counter() - begun:.2f} s")
    page.close()
    return steps + 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of rollouts, over all runs")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_runs(Path(folder), given.runs, given.steps, given.gigabytes)
        measure(Path(folder), given.runs, given.steps)


if __name__ == "__main__":
    main()
