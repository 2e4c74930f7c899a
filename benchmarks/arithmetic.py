"""More imitation against reinforcement, from one start, for equal wall-clock time: `make train_quick`,
`make train_full`.

For each difficulty a tiny model first imitates demonstrations. Then one arm continues to imitate them, with each of
three learning rates, and the other arm learns from the verifier's rewards, for the same training time.
"""

from __future__ import annotations

import argparse
import math
import shutil
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.runs import metrics, novarl, summary

BUDGETS = {"quick": ((5, 250, 20),), "full": ((5, 250, 40), (6, 300, 40))}
"""(difficulty, supervised steps before the arms part, RL steps) by budget."""
SFT_RATES = (3e-3, 1e-3, 3e-4)
SAMPLES = 8


def seconds_of(run_dir: Path, phase: str) -> list[float]:
    """The seconds of every update, evaluations and saves left out."""
    return [line["time/step_s"] for line in metrics(run_dir) if line["phase"] == phase]


def measure(model: Path, difficulty: int, run_dir: Path) -> dict[str, Any]:
    """Greedy score and pass@k on the held-out rows."""
    novarl(
        "eval",
        f"model={model}",
        "task=arithmetic",
        f"task_options.difficulty={difficulty}",
        f"eval.k={SAMPLES}",
        f"run_dir={run_dir}",
    )
    return summary(run_dir)["after"]


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[float, float, float]:
    """(difference of pass@1, lower and upper end of its 95 % interval). Rows count as one draw each, so the interval is
    wider than the eight samples a row would allow."""
    a, b, n = ours["pass@1"], theirs["pass@1"], min(ours["n"], theirs["n"])
    half = 1.959964 * math.sqrt(a * (1 - a) / n + b * (1 - b) / n)
    return a - b, a - b - half, a - b + half


def compare(difficulty: int, sft_steps: int, rl_steps: int, *, folder: Path, seed: int) -> dict[str, Any]:
    """Both arms at one difficulty."""
    common = ["task=arithmetic", f"task_options.difficulty={difficulty}", f"seed={seed}", "log.console=false"]
    start, rl = folder / f"start-{difficulty}", folder / f"rl-{difficulty}"
    quiet = ["eval.n=10", "save_every=null"]
    novarl("sft", *common, *quiet, "model=tiny", "batch_size=64", "optim.lr=3e-3", "optim.schedule=linear",
           "optim.min_lr_ratio=0.1", f"steps={sft_steps}", f"run_dir={start}")  # fmt: skip
    model = start / "checkpoints" / "latest" / "model"
    scores = {"start": measure(model, difficulty, folder / f"eval-start-{difficulty}")}
    novarl("rl", *common, *quiet, f"model={model}", "responses_per_prompt=8", f"steps={rl_steps}", f"run_dir={rl}")
    scores["RL"] = measure(rl / "checkpoints" / "latest" / "model", difficulty, folder / f"eval-rl-{difficulty}")
    budget = sum(seconds_of(rl, "rl"))
    seconds = {"start": sum(seconds_of(start, "sft")), "RL": budget}
    a_step = sorted(seconds_of(start, "sft"))[sft_steps // 10]  # a quick one: the supervised arms get rather more time
    for rate in SFT_RATES:
        run_dir = folder / f"sft-{difficulty}-{rate:g}"
        novarl("sft", *common, *quiet, f"model={model}", "batch_size=64", f"optim.lr={rate}", "optim.schedule=linear",
               f"steps={math.ceil(1.05 * budget / a_step)}", f"run_dir={run_dir}")  # fmt: skip
        name = f"SFT, lr {rate:g}"
        seconds[name] = sum(seconds_of(run_dir, "sft"))
        scores[name] = measure(
            run_dir / "checkpoints" / "latest" / "model", difficulty, folder / f"eval-{run_dir.name}"
        )
    best = max((name for name in scores if name.startswith("SFT")), key=lambda name: scores[name]["pass@1"])
    gap = difference(scores["RL"], scores[best])
    curve = [line["reward_mean"] for line in metrics(rl) if line["phase"] == "rl"]
    return {
        "difficulty": difficulty,
        "scores": scores,
        "seconds": seconds,
        "best_sft": best,
        "gap": gap,
        "curve": curve,
    }


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """The reward during RL, with the start and the best supervised arm as lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(results), 3.6), layout="constrained")
    for place, result in enumerate(results):
        plot = figure.add_subplot(1, len(results), place + 1)
        plot.plot(
            range(1, len(result["curve"]) + 1), result["curve"], color="#1f6feb", label="RL: reward of the samples"
        )
        for name, colour in (("start", "#8b949e"), (result["best_sft"], "#d1242f"), ("RL", "#1f6feb")):
            style = "--" if name == "RL" else ":"
            label = f"{name}: pass@1 on held-out rows" + (", after" if name == "RL" else "")
            plot.axhline(result["scores"][name]["pass@1"], color=colour, linestyle=style, label=label)
        plot.set(title=f"arithmetic, {result['difficulty']} digits", xlabel="RL step", ylim=(0, 1.02))
        plot.legend(fontsize=7, loc="lower right")
    figure.savefig(path, dpi=130)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", choices=BUDGETS, default="quick")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the runs are kept")
    arguments = parser.parse_args()
    folder = arguments.runs / f"arithmetic-{arguments.budget}"
    shutil.rmtree(folder, ignore_errors=True)
    begin = time.perf_counter()
    results = []
    for difficulty, sft_steps, rl_steps in BUDGETS[arguments.budget]:
        results.append(compare(difficulty, sft_steps, rl_steps, folder=folder, seed=arguments.seed))
        print(f"difficulty {difficulty}: RL - best SFT = {results[-1]['gap'][0]:+.3f}", flush=True)
    rows = [
        [
            r["difficulty"],
            name,
            r["seconds"][name],
            score["score"],
            score["pass@1"],
            score[f"pass@{SAMPLES}"],
            score["n"],
        ]
        for r in results
        for name, score in r["scores"].items()
    ]
    gaps = [
        f"{r['difficulty']} digits: RL is {100 * r['gap'][0]:+.1f} points ahead of {r['best_sft']} in pass@1, "
        f"95 % interval {100 * r['gap'][1]:+.1f} to {100 * r['gap'][2]:+.1f}."
        for r in results
    ]
    met = all(r["gap"][0] >= 0.20 and r["gap"][1] > 0 for r in results)
    name = f"arithmetic-{arguments.budget}"
    report.RESULTS.mkdir(parents=True, exist_ok=True)
    draw(results, report.RESULTS / f"{name}.png")
    body = (
        f"{(__doc__ or '').strip()}\n\nGoal: RL ahead by at least 20 points, the interval above 0: "
        f"{'met' if met else 'NOT met'}. Total time {time.perf_counter() - begin:.0f} s.\n\n"
        + report.table(["digits", "arm", "training seconds", "greedy", "pass@1", f"pass@{SAMPLES}", "n"], rows)
        + "\n\n"
        + "\n\n".join(gaps)
        + f"\n\n![Reward during RL, and the arms' held-out scores]({name}.png)"
    )
    report.write(
        name, f"Arithmetic: imitation or reinforcement ({arguments.budget})", body, {"results": results, "met": met}
    )
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
