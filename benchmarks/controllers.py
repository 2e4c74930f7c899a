"""Controllers, constraints and several objectives on real runs: `make bench-controllers`.

From one supervised start of `task=sort` for each seed. Its demonstrations sort every fifth time, so a policy that
always sorts is about 0.27 nats per token away: targets below that pull against the reward.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import report
from benchmarks.learning import start
from benchmarks.runs import metrics
from novarl.algos.hypervolume import hypervolume
from novarl.algos.pareto import Evaluated
from novarl.observe.front import draw_front

TARGET, BAND, STEPS, SETTLED = 0.1, 1.5, 120, 50
LIMIT = 0.1
CONTROLLERS: dict[str, tuple[str, ...]] = {
    "dead_band": (),
    "ziegler": ("adaptive_kl.horizon=640",),
    "exponential": (),
    "two_speed": (),
    "linear": (),
    "pid": (),
}
"""Each with its defaults, but for Ziegler's horizon: five steps' episodes, where the authors had hundreds of steps."""
LOW, HIGH = 0.02, 0.5
"""Coefficients between which the controllers of the saturation runs may move."""
WEIGHTS = (0.1, 0.3, 1.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side, each with OMP_NUM_THREADS threads")
    arguments = parser.parse_args()
    seeds = range(arguments.seeds)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(arguments.at_once) as pool:
        home = Path(scratch)
        starts = list(pool.map(lambda seed: start(home, seed), seeds))

        def run(one: tuple[str, int, tuple[str, ...]]) -> list[dict[str, Any]]:
            name, seed, words = one
            return train(home / f"{name}-{seed}", starts[seed], seed, words)

        arms = {**adaptive(), **constrained(), **weighed()}
        wanted = [(name, seed, words) for name, words in arms.items() for seed in seeds]
        found: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in arms}
        for (name, _, _), records in zip(wanted, pool.map(run, wanted), strict=True):
            found[name].append(records)
    parts = [in_band(found), bounds(found), front(found)]
    body = "\n\n".join(text for text, _, _ in parts)
    met = all(fine for _, fine, _ in parts)
    data = {key: value for _, _, part in parts for key, value in part.items()}
    report.write("controllers", "Controllers, constraints, objectives", body, {"met": met, **data})
    return 0 if met else 1


def train(run_dir: Path, model: Path, seed: int, words: Sequence[str]) -> list[dict[str, Any]]:
    """The metrics of one run, by step."""
    fixed = ["rl", "task=sort", f"model={model}", f"seed={seed}", f"run_dir={run_dir}", "eval.n=1", "save_every=null"]
    command = [sys.executable, "-m", "novarl", *fixed, "log.tensorboard=false", "log.console=false", *words]
    done = subprocess.run(command, text=True, capture_output=True, check=False, env=dict(os.environ))
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    steps = {int(record["step"]): record for record in metrics(run_dir)}
    last = steps[max(steps)]
    print(json.dumps({"run": run_dir.name, "kl": last.get("kl_mean"), "reward": last["reward_raw_mean"]}), flush=True)
    return [steps[step] for step in sorted(steps)]


def adaptive() -> dict[str, tuple[str, ...]]:
    """The coefficient starts ten times too small and has to find its place."""
    common = ("kl.type=loss", "adaptive_kl.enabled=true", f"adaptive_kl.target_kl={TARGET}", f"steps={STEPS}")
    return {
        name: (*common, "adaptive_kl.initial_coef=0.1", f"adaptive_kl.controller_type={name}", *words)
        for name, words in CONTROLLERS.items()
    }


def in_band(found: Mapping[str, list[list[dict[str, Any]]]]) -> tuple[str, bool, dict[str, Any]]:
    """The share of steps after the 50th with KL in the band, and how long a coefficient stood at a bound."""
    rows, data, met = [], {}, True
    for name in CONTROLLERS:
        shares, ends = [], []
        for records in found[name]:
            late = [record["kl_mean"] for record in records[SETTLED:]]
            shares.append(fmean(TARGET / BAND <= value <= TARGET * BAND for value in late))
            ends.append(records[-1]["kl_coef"])
        fine = min(shares) >= 0.8
        met &= fine
        rows.append([name, *(f"{share:.0%}" for share in shares), f"{fmean(ends):.2f}", "yes" if fine else "NO"])
        data[name] = {"in_band": shares, "final_coef": ends}
    text = (
        f"## Controllers\n\nKL target {TARGET} nats per token, {STEPS} steps. The share of steps after the {SETTLED}th "
        f"with KL in [target/{BAND}, target*{BAND}], by seed; goal: at least 80 % in each. Every coefficient starts at "
        "0.1.\n\n"
        + report.table(
            ["controller", *(f"seed {seed}" for seed in range(len(shares))), "final coefficient", "goal met"], rows
        )
    )
    return text, met, {"controllers": data}


def constrained() -> dict[str, tuple[str, ...]]:
    """The same run without a bound, and with each kind of one."""
    on = ("constraint_optimization.enabled=true", f"constraint_optimization.kl_constraint={LIMIT}", f"steps={STEPS}")
    return {
        "free": (f"steps={STEPS}", "kl.type=loss", "kl.estimator=k2", "kl.coef=0.0001"),
        "lagrangian": (*on, "constraint_optimization.lagrangian_kp=0.5"),
        "softplus": (*on, "constraint_optimization.dual=softplus"),
        "penalty": (*on, "constraint_optimization.mode=penalty"),
    }


def bounds(found: Mapping[str, list[list[dict[str, Any]]]]) -> tuple[str, bool, dict[str, Any]]:
    """How far KL stands beyond its limit, with and without a constraint."""
    rows, data = [], {}
    for name in constrained():
        late = [record["kl_mean"] for records in found[name] for record in records[SETTLED:]]
        reward = fmean(records[-1]["reward_raw_mean"] for records in found[name])
        excess = fmean(max(0.0, value - LIMIT) for value in late)
        rows.append([name, fmean(late), excess, reward])
        data[name] = {"kl": fmean(late), "violation": excess, "reward": reward}
    free = data["free"]["violation"]
    met = all(data[name]["violation"] <= 0.25 * free for name in data if name != "free")
    text = (
        f"## Constraints\n\nKL to the start at most {LIMIT} nats per token; means over seeds and the steps after the "
        f"{SETTLED}th. Goal: at most a quarter of the violation of the free run: {'met' if met else 'NOT met'}.\n\n"
        + report.table(["mode", "KL", "violation", "reward at the end"], rows)
    )
    return text, met, {"constraints": data}


def weighed() -> dict[str, tuple[str, ...]]:
    """Reward alone, and reward with KL as a second objective under several weights."""
    arms = {"one objective": (f"steps={STEPS // 2}", "kl.type=loss", "kl.estimator=k2", "kl.coef=0.0001")}
    for method in ("weighted_sum", "smooth_tchebycheff"):
        for weight in WEIGHTS:
            objectives = (
                f"{{sorted: {{direction: max, ideal: 1.0}}, kl: {{direction: min, ideal: 0.0, weight: {weight}}}}}"
            )
            arms[f"{method} {weight}"] = (
                f"steps={STEPS // 2}",
                "multi_objective.enabled=true",
                f"multi_objective.method={method}",
                f"multi_objective.objectives={objectives}",
            )
    return arms


def front(found: Mapping[str, list[list[dict[str, Any]]]]) -> tuple[str, bool, dict[str, Any]]:
    """Where the runs end in the plane of reward and KL per answer, and the hypervolume of each family."""
    points = {
        name: (
            fmean(records[-1]["reward_raw_mean"] for records in found[name]),
            fmean(records[-1]["kl_sequence"] for records in found[name]),
        )
        for name in weighed()
    }
    reference = (0.0, 1.05 * max(kl for _, kl in points.values()))
    family = {
        kind: hypervolume([(r, -k) for name, (r, k) in points.items() if name.startswith(kind)], (0.0, -reference[1]))
        for kind in ("one objective", "weighted_sum", "smooth_tchebycheff")
    }
    evaluated = [Evaluated(name, point) for name, point in points.items()]
    draw_front(
        evaluated,
        report.RESULTS / "controllers.png",
        ("reward", "KL per answer"),
        directions=("max", "min"),
        reference=reference,
        title="task=sort: reward against KL to the start",
    )
    met = min(family["weighted_sum"], family["smooth_tchebycheff"]) > family["one objective"]
    text = (
        "## Objectives\n\nMean reward of the sampled answers and KL per answer at the end, means over seeds. "
        "Hypervolume over reward 0 and the worst KL: "
        + ", ".join(f"{kind} {value:.3f}" for kind, value in family.items())
        + f". Goal: several objectives cover more than one: {'met' if met else 'NOT met'}.\n\n"
        + report.table(["run", "reward", "KL per answer"], [[name, *point] for name, point in points.items()])
        + "\n\n![Front](controllers.png)"
    )
    return text, met, {"front": points, "hypervolume": family}


if __name__ == "__main__":
    raise SystemExit(main())
