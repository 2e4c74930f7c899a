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
from novarl.control.front_figure import draw_front
from novarl.control.hypervolume import hypervolume
from novarl.control.pareto import Evaluated
from novarl.observe.figures import COLOURS, INK, STYLE

Records = list[dict[str, Any]]

PLANT = ("optim.lr=3e-4", "optim.betas=[0.5,0.95]")
"""Of every run. With one update a step, Adam's usual momentum of 0.9 is a delay of ten steps between a coefficient and
what it does."""
TARGET, BAND, STEPS, SETTLED = 0.1, 1.5, 100, 50
FIRST = 0.2
"""The coefficient that the controllers begin with, their lower bound; about 0.35 holds the target."""
CONTROLLERS: dict[str, tuple[str, ...]] = {
    "dead_band": (),
    "ziegler": ("adaptive_kl.horizon=640",),
    "exponential": (),
    "two_speed": (),
    "linear": (),
    "pid": (),
}
"""Each with its defaults, but for Ziegler's horizon: five steps' episodes, where the authors had hundreds of steps."""
LIMIT, BOUND_STEPS = 0.1, 80
FRONT_STEPS = 40
WEIGHTS = (0.1, 0.3, 1.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side, each with OMP_NUM_THREADS threads")
    parser.add_argument("--home", type=Path, help="keep the runs here; those that have ended are not run again")
    arguments = parser.parse_args()
    seeds = range(arguments.seeds)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(arguments.at_once) as pool:
        home = arguments.home or Path(scratch)
        starts = list(pool.map(lambda seed: begun(home / f"start-{seed}") or start(home, seed), seeds))

        def run(one: tuple[str, int, tuple[str, ...]]) -> Records:
            name, seed, words = one
            return train(home / f"{name}-{seed}", starts[seed], seed, words)

        arms = {**adaptive(), **constrained(), **weighed()}
        wanted = [(name, seed, words) for name, words in arms.items() for seed in seeds]
        found: dict[str, list[Records]] = {name: [] for name in arms}
        for (name, _, _), records in zip(wanted, pool.map(run, wanted), strict=True):
            found[name].append(records)
    parts = [in_band(found), bounds(found), front(found)]
    body = "\n\n".join(text for text, _, _ in parts)
    met = all(fine for _, fine, _ in parts)
    data = {key: value for _, _, part in parts for key, value in part.items()}
    report.write("controllers", "Controllers, constraints, objectives", body, {"met": met, **data})
    return 0 if met else 1


def begun(run_dir: Path) -> Path | None:
    """The supervised model that a run begins with, where an earlier call has left it."""
    ended = (run_dir / "summary.json").exists()
    return next((run_dir / "checkpoints").glob("warmup-*")) / "model" if ended else None


def train(run_dir: Path, model: Path, seed: int, words: Sequence[str]) -> Records:
    """The metrics of one run, by step."""
    fixed = ["rl", "task=sort", f"model={model}", f"seed={seed}", f"run_dir={run_dir}", "eval.n=1", "save_every=null"]
    command = [sys.executable, "-m", "novarl", *fixed, "log.tensorboard=false", "log.console=false", *PLANT, *words]
    if not (run_dir / "summary.json").exists():
        done = subprocess.run(command, text=True, capture_output=True, check=False, env=dict(os.environ))
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    steps = {int(record["step"]): record for record in metrics(run_dir)}
    last = steps[max(steps)]
    print(json.dumps({"run": run_dir.name, "kl": last["kl_mean"], "reward": last["reward_raw_mean"]}), flush=True)
    return [steps[step] for step in sorted(steps)]


def adaptive() -> dict[str, tuple[str, ...]]:
    """The coefficient begins at its lower bound, too small, and while KL rises from 0 is pushed against it."""
    common = ("kl.type=loss", "adaptive_kl.enabled=true", f"adaptive_kl.target_kl={TARGET}", f"steps={STEPS}")
    begin = (f"adaptive_kl.initial_coef={FIRST}", f"adaptive_kl.min_coef={FIRST}")
    return {
        name: (*common, *begin, f"adaptive_kl.controller_type={name}", *words) for name, words in CONTROLLERS.items()
    }


def in_band(found: Mapping[str, Sequence[Records]]) -> tuple[str, bool, dict[str, Any]]:
    """The share of steps after the 50th with KL in the band, and how long a coefficient stood at its bound for
    nothing."""
    rows, data, met = [], {}, True
    for name in CONTROLLERS:
        late = [[record["kl_mean"] for record in records[SETTLED:]] for records in found[name]]
        shares = [fmean(TARGET / BAND <= value <= TARGET * BAND for value in values) for values in late]
        stuck = max(saturated(records) for records in found[name])
        fine = min(shares) >= 0.8 and stuck <= 10
        met &= fine
        coef = fmean(record["kl_coef"] for records in found[name] for record in records[SETTLED:])
        mean = fmean(value for values in late for value in values)
        rows.append([name, *(f"{share:.0%}" for share in shares), mean, coef, stuck, "yes" if fine else "NO"])
        data[name] = {
            "in_band": shares,
            "saturated": stuck,
            "kl": [[record["kl_mean"] for record in records] for records in found[name]],
            "coef": [[record["kl_coef"] for record in records] for records in found[name]],
        }
    draw_controllers(data, report.RESULTS / "controllers-kl.png")
    text = (
        f"## Controllers\n\nKL target {TARGET} nats per token, {STEPS} steps. The share of steps after the {SETTLED}th "
        f"with KL, as measured on that step's 128 answers, in [target/{BAND}, target*{BAND}], by seed; goal: at least "
        f"80 % in each. Every coefficient begins at {FIRST}, which is its lower bound and too small by almost half: KL "
        "rises through the band and beyond, and the controller has to come off the bound. Saturated: the steps for "
        "which it stood there although KL was beyond the band, the worst of all seeds; goal: at most 10. The mean KL "
        "and coefficient are those after the 50th step. Gains are the defaults, but for Ziegler's horizon of 640 "
        "episodes.\n\n"
        "Learning rate 3e-4 and Adam's first momentum 0.5, so that KL responds sooner than with the usual 0.9; this "
        "setting was chosen on seed 0. **With momentum 0.9 KL oscillates**: a simulation fitted to two such runs puts "
        "the share of steps in the band at 59 to 73 % with the default gains, below the goal.\n\n"
        + report.table(
            ["controller", *(f"seed {n}" for n in range(len(shares))), "KL", "coefficient", "saturated", "goals met"],
            rows,
        )
        + "\n\n`two_speed` rises three times as fast as it falls, so it rests where KL is above the target a quarter "
        "of the time: the noisier KL is, the further its middle lies below the band's. That is its rule, kept for runs "
        "that were tuned with it; `exponential` has no such bias. `tests/algos/test_controllers.py` holds each to "
        "leaving either bound within 10 updates after 3000 at it."
        + "\n\n![KL by step](controllers-kl.png)\n\nKL by step, a line for each seed; the band is shaded."
    )
    return text, met, {"controllers": data}


def saturated(records: Records) -> int:
    """The steps in a row, at the most, for which the coefficient stood at its lower bound with KL beyond the band."""
    longest = row = 0
    for record in records:
        row = row + 1 if record["kl_coef"] <= FIRST and record["kl_mean"] > TARGET * BAND else 0
        longest = max(longest, row)
    return longest


def draw_controllers(data: Mapping[str, Any], path: Path) -> None:
    """KL by step, a panel for each controller and a line for each seed."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.0, 4.8), dpi=130, layout="constrained", facecolor="white")
        plots = figure.subplots(2, 3, sharex=True, sharey=True).ravel()
        for plot, (name, found) in zip(plots, data.items(), strict=True):
            plot.axhspan(TARGET / BAND, TARGET * BAND, color=COLOURS[0], alpha=0.12, linewidth=0)
            plot.axhline(TARGET, color=COLOURS[0], linewidth=0.8)
            plot.axvline(SETTLED, color=INK, linewidth=0.8, linestyle=":")
            for seed, values in enumerate(found["kl"]):
                plot.plot(range(1, len(values) + 1), values, linewidth=1.0, color=COLOURS[1 + seed])
            shares = ", ".join(f"{share:.0%}" for share in found["in_band"])
            plot.set_title(f"{name}: {shares}", fontsize=10)
            plot.set_yscale("log")
            plot.set_ylim(0.01, 1.0)
            plot.set_yticks([0.01, 0.1, 1.0], ["0.01", "0.1", "1"])
        figure.supxlabel("step", fontsize=9)
        figure.supylabel("KL to the start, nats per token", fontsize=9)
        figure.savefig(path)


def constrained() -> dict[str, tuple[str, ...]]:
    """The same run without a bound, and with each kind of one."""
    on = (
        "constraint_optimization.enabled=true",
        f"constraint_optimization.kl_constraint={LIMIT}",
        "constraint_optimization.lagrangian_init=0.3",
        f"steps={BOUND_STEPS}",
    )
    return {
        "free": (f"steps={BOUND_STEPS}", "kl.type=loss", "kl.estimator=k2", "kl.coef=0.0001"),
        "lagrangian": (*on, "constraint_optimization.lagrangian_lr=0.03", "constraint_optimization.lagrangian_kp=0.3"),
        "softplus": (*on, "constraint_optimization.dual=softplus", "constraint_optimization.lagrangian_lr=0.3"),
        "penalty": (*on, "constraint_optimization.mode=penalty"),
    }


def bounds(found: Mapping[str, Sequence[Records]]) -> tuple[str, bool, dict[str, Any]]:
    """How far KL stands beyond its limit, with and without a constraint."""
    data = {}
    for name in constrained():
        late = [record for records in found[name] for record in records[SETTLED:]]
        data[name] = {
            "kl": fmean(record["kl_mean"] for record in late),
            "violation": fmean(max(0.0, record["kl_mean"] - LIMIT) for record in late),
            "reward": fmean(record["reward_raw_mean"] for record in late),
        }
    free = data["free"]["violation"]
    fine = {name: of["violation"] <= 0.25 * free for name, of in data.items() if name != "free"}
    rows = [
        [name, *of.values(), of["violation"] / free, "" if name == "free" else "yes" if fine[name] else "NO"]
        for name, of in data.items()
    ]
    text = (
        f"## Constraints\n\nKL to the start at most {LIMIT} nats per token; means over seeds and the steps after the "
        f"{SETTLED}th of {BOUND_STEPS}. Violation: the mean of max(0, KL - limit), step by step, so that noise about "
        "the limit counts too. Multipliers begin at 0.3, near where they end, with gains chosen in a "
        "simulation. Goal: at most a quarter of that of the free run.\n\n"
        + report.table(["mode", "KL", "violation", "reward", "of the free run's violation", "goal met"], rows)
    )
    return text, all(fine.values()), {"constraints": data}


def weighed() -> dict[str, tuple[str, ...]]:
    """Reward with KL as a second objective under several weights; reward alone is the free run of the constraints."""
    arms: dict[str, tuple[str, ...]] = {}
    for method in ("weighted_sum", "smooth_tchebycheff"):
        for weight in WEIGHTS:
            objectives = (
                f"{{sorted: {{direction: max, ideal: 1.0}}, kl: {{direction: min, ideal: 0.0, weight: {weight}}}}}"
            )
            arms[f"{method} {weight}"] = (
                f"steps={FRONT_STEPS}",
                "multi_objective.enabled=true",
                f"multi_objective.method={method}",
                f"multi_objective.objectives={objectives}",
            )
    return arms


def front(found: Mapping[str, Sequence[Records]]) -> tuple[str, bool, dict[str, Any]]:
    """Where the runs end in the plane of reward and KL per answer, and the hypervolume of each family."""
    ends = {
        name: [record for records in found[arm] for record in records[FRONT_STEPS - 5 : FRONT_STEPS]]
        for name, arm in {"one objective": "free", **{arm: arm for arm in weighed()}}.items()
    }
    points = {
        name: (fmean(record["reward_raw_mean"] for record in last), fmean(record["kl_sequence"] for record in last))
        for name, last in ends.items()
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
        title="task=sort: reward and KL",
    )
    met = min(family["weighted_sum"], family["smooth_tchebycheff"]) > family["one objective"]
    text = (
        f"## Objectives\n\nMean reward of the sampled answers and KL per answer over the last five of {FRONT_STEPS} "
        "steps, means over seeds. Hypervolume over reward 0 and the worst KL, of three runs against one: "
        + ", ".join(f"{kind} {value:.3f}" for kind, value in family.items())
        + f". Goal: several objectives cover more than one: {'met' if met else 'NOT met'}.\n\n"
        + report.table(["run", "reward", "KL per answer"], [[name, *point] for name, point in points.items()])
        + "\n\n![Front](controllers.png)"
    )
    return text, met, {"front": points, "hypervolume": family}


if __name__ == "__main__":
    raise SystemExit(main())
