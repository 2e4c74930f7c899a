"""Values by continuations against values by a critic, on a task of several steps: `make bench-vineppo`.

PPO and VinePPO from the same supervised start with equally many updates. At the end each policy answers held-out
prompts, and the value of every state in which a step begins is known from 256 continuations of that same policy.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from benchmarks import report
from benchmarks.learning import STUDENT
from benchmarks.runs import metrics, novarl, summary
from novarl.build.machine import start as start_machine
from novarl.build.resolve import resolve_rl
from novarl.build.rl import compose
from novarl.build.session import Interrupts, open_run
from novarl.build.stages import online_stages
from novarl.build.suppliers import Continue
from novarl.config.load import load
from novarl.config.tree import RLConfig
from novarl.data.pack import pack
from novarl.learn.critic import Critic
from novarl.learn.vine import State, answer_of, boundaries

TASK = ("task=arithmetic", "task_options.difficulty=4")
TRUTH, PROMPTS, STEPS = 256, 16, 25
SIZE = ("prompts_per_rollout=8", "responses_per_prompt=4")
ARMS = {"ppo": (), "vineppo": ("vine.samples=9",)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, choices=STUDENT)
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side, each with OMP_NUM_THREADS threads")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        print(json.dumps(measure(arguments.measure)))
        return 0
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(arguments.at_once) as pool:
        home = Path(scratch)
        starts = list(pool.map(lambda seed: begin(home, seed), range(arguments.seeds)))
        wanted = [(algo, seed) for seed in range(arguments.seeds) for algo in ARMS]
        found = list(pool.map(lambda one: train(home, starts[one[1]], *one), wanted))
    by = {algo: [run for run in found if run["algo"] == algo] for algo in ARMS}
    error = {algo: fmean(run["error"] for run in runs) for algo, runs in by.items()}
    gains = [vine["after"] - ppo["after"] for vine, ppo in zip(by["vineppo"], by["ppo"], strict=True)]
    slack = STUDENT[len(gains)] * (stdev(gains) / math.sqrt(len(gains)) if gains[1:] else math.inf)
    met = {"error": error["vineppo"] <= 0.5 * error["ppo"], "accuracy": fmean(gains) > 0}
    body = (
        f"`task=arithmetic` with four digits, {arguments.seeds} seeds, {STEPS} steps of 8 prompts with 4 answers, four "
        f"updates each. Error: |value - truth|, the mean over the states in which a step of {PROMPTS} held-out answers "
        f"begins; truth is the mean of {TRUTH} continuations, VinePPO's value of 9.\n\n"
        f"VinePPO's error is {error['vineppo'] / error['ppo']:.2f} of the critic's (goal: at most 0.5, "
        f"{'met' if met['error'] else 'NOT met'}). Accuracy at equal updates: {fmean(gains):+.3f} (95 % interval "
        f"{fmean(gains) - slack:.3f} to {fmean(gains) + slack:.3f}; goal: higher, "
        f"{'met' if met['accuracy'] else 'NOT met'}). The last columns count all "
        "tokens generated, those of answers and of continuations.\n\n"
        + report.table(
            ["algorithm", "seed", "before", "after", "value error", "tokens generated", "points per million tokens"],
            [
                [
                    run["algo"],
                    run["seed"],
                    run["before"],
                    run["after"],
                    run["error"],
                    f"{run['tokens']:,}",
                    f"{100 * (run['after'] - run['before']) / (run['tokens'] / 1e6):.1f}",
                ]
                for runs in by.values()
                for run in runs
            ],
        )
        + "\n\n![Values](vineppo.png)\n\nEach state's estimate over its true value; the diagonal is no error."
    )
    draw(by, report.RESULTS / "vineppo.png")
    report.write("vineppo", "Values by continuations", body, {"met": met, "runs": found})
    return 0 if all(met.values()) else 1


def begin(home: Path, seed: int) -> Path:
    """The supervised start of a seed."""
    novarl("rl", *TASK, f"seed={seed}", "steps=1", f"run_dir={home / f'start-{seed}'}", "eval.n=1")
    (warm,) = (home / f"start-{seed}" / "checkpoints").glob("warmup-*")
    return warm / "model"


def train(home: Path, model: Path, algo: str, seed: int) -> dict[str, Any]:
    """One run, and what its values are worth at its end."""
    run_dir = home / f"{algo}-{seed}"
    words = [*TASK, *SIZE, f"model={model}", f"algo={algo}", f"seed={seed}", f"steps={STEPS}", *ARMS[algo]]
    novarl("rl", *words, f"run_dir={run_dir}", "log.tensorboard=false", "save_every=null")
    said = summary(run_dir)
    steps = {int(record["step"]): record for record in metrics(run_dir)}
    tokens = sum(record["completion_tokens"] + record.get("value_tokens", 0.0) for record in steps.values())
    command = [sys.executable, "-m", "benchmarks.vineppo", "--measure", str(run_dir)]
    done = subprocess.run(command, text=True, capture_output=True, check=False, env=dict(os.environ))
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{done.stderr}")
    found = {
        "algo": algo,
        "seed": seed,
        "before": said["before"]["score"],
        "after": said["after"]["score"],
        "tokens": int(tokens),
        "seconds": said["seconds"],
        **json.loads(done.stdout.splitlines()[-1]),
    }
    print(json.dumps({key: value for key, value in found.items() if key not in ("truth", "estimate")}), flush=True)
    return found


def measure(run_dir: Path) -> dict[str, Any]:
    """The estimates of a finished run's policy and supplier, and the truth of that policy."""
    config = load(RLConfig, run_dir / "config.yaml", [f"run_dir={run_dir}", "resume=auto"])
    plan = resolve_rl(config)
    device, ranks = start_machine(config.device, config.threads, config.seed)
    with Interrupts() as interrupts:
        opened = open_run("rl", config.run_dir, config.resume, ranks)
        run = compose(config, plan, ranks=ranks, device=device, opened=opened, interrupts=interrupts)
        stages = online_stages(run)
        assert run.state is not None and stages.supplier is not None
        stages.supplier.load_state_dict(run.state["supplier"])
        rollouts = run.sampler.train(list(enumerate(run.rows.held_out[:PROMPTS])), 10**6)[
            :: config.responses_per_prompt
        ]
        kept = run.judge.score(rollouts)
        batch = pack(kept)
        scores, _ = stages.supplier.supply(kept, batch, stages.learner.score(batch), 10**6)
        assert scores.values is not None
        states, estimates = [], []
        for number, item in enumerate(kept):
            answer = answer_of(item.rollout)
            mine = batch.mask.nonzero().flatten()[
                torch.repeat_interleave(batch.traj, batch.cu_seqlens.diff())[batch.mask] == number
            ]
            for at in boundaries(answer, run.policy.tokenizer.decode, split=plan.split, most=config.vine.max_steps):
                states.append(State(item.rollout.prompt, answer[:at]))
                estimates.append(scores.values[mine[at]].item())
        truth = [found.value for found in Continue(run, samples=TRUTH)(states, 2 * 10**6)]
        critic = isinstance(stages.supplier, Critic)
        run.rewards.close()
        run.engine.close()
    error = fmean(abs(estimate - true) for estimate, true in zip(estimates, truth, strict=True))
    return {"error": error, "critic": critic, "truth": truth, "estimate": estimates}


def draw(by: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Estimate over truth, one panel for each algorithm."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    for panel, (algo, runs) in zip(figure.subplots(1, len(by), sharex=True, sharey=True), by.items(), strict=True):
        panel.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        for run in runs:
            panel.scatter(run["truth"], run["estimate"], s=10, alpha=0.4, color="tab:blue", linewidths=0)
        error = fmean(run["error"] for run in runs)
        panel.set_title(f"{algo}: mean error {error:.3f}", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(f"truth: the mean of {TRUTH} continuations", fontsize=9)
    figure.supylabel("estimate", fontsize=9)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    raise SystemExit(main())
