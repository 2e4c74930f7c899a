"""From preferences to a reward model to PPO, and what happens when it is optimised too far: `make bench-rm-ppo`.

Gold (the three scripted rewards of `task=sentiment`, less 1 for each word that is none) labels a few hundred pairs of
answers of the supervised policy, every fourth label wrong. A reward model learns from them; PPO learns from the reward
model and never sees gold. With KL under control gold rises; without it the reward model's score goes on rising and gold
falls from its peak, as in Gao et al. (https://arxiv.org/abs/2210.10760).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks import report
from benchmarks.learning import STUDENT
from benchmarks.runs import metrics, novarl, summary
from novarl.build.rows import raw
from novarl.build.sampling import Sampler, local_engine
from novarl.core.types import Sampling, Scored
from novarl.data.dataset import load_rl
from novarl.envs.single_turn import SingleTurn
from novarl.models.load import load
from novarl.rewards.compose import RewardSet
from novarl.rewards.registry import find_reward
from novarl.tasks.registry import Split, find_task

TASK = "sentiment"
GOLD = {name: name for name in find_task(TASK).rewards()} | {
    "unknown": f"{report.ROOT}/benchmarks/unknown_words.py:unknown_words"
}
"""The parts of gold, which are summed, and where each is found. The start writes known words only: what a reward model
learns from its answers says nothing of others."""
PROMPTS, FLIPPED = 256, 0.25
"""Pairs of answers that are labelled for each seed, and the share of labels that are wrong."""
STEPS, SETTLED = 60, 20
TARGET, BAND = 6.0, 2.0
"""KL to the start in nats per answer, and by which factor it may stray to either side."""
LOW, HIGH = TARGET / BAND, TARGET * BAND
WINDOW = 5
"""Steps over which a curve is averaged before its peak is looked for."""
HELD_OUT = 200
"""Prompts whose answers are scored at the end."""
QUIET = ("eval.n=1", "save_every=null", "log.tensorboard=false", "log.console=false", "resume=auto")
RM = ("epochs=4", "batch_size=16", "centring=0.01")
PPO = (
    *("algo=ppo", "prompts_per_rollout=16", "responses_per_prompt=4", "rollout.max_batch=64"),
    *("optim.lr=3e-4", "optim.betas=[0.5,0.95]"),
)
"""A short first momentum, so that KL answers to its price at once (docs/results/controllers.md)."""
ARMS: dict[str, tuple[str, ...]] = {
    "controlled": (
        "kl.unit=sequence",
        "adaptive_kl.enabled=true",
        "adaptive_kl.controller_type=exponential",
        f"adaptive_kl.target_kl={TARGET}",
        "adaptive_kl.initial_coef=0.06",
    ),
    "free": ("kl.coef=1e-6",),  # so little that it moves nothing; at 0 nobody would measure KL
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, choices=STUDENT)
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side, each with OMP_NUM_THREADS threads")
    parser.add_argument("--runs", type=Path, help="keep the runs here; those that are there already go on")
    arguments = parser.parse_args()
    seeds, began = range(arguments.seeds), time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(arguments.at_once) as pool:
        home = arguments.runs or Path(scratch)
        home.mkdir(parents=True, exist_ok=True)
        start = supervised(home)
        models = list(pool.map(lambda seed: reward_model(home, start, seed), seeds))
        wanted = [(arm, seed) for seed in seeds for arm in ARMS]
        runs = list(pool.map(lambda one: optimise(home, start, models[one[1]]["model"], *one), wanted))
    found = {arm: [run for run in runs if run["arm"] == arm] for arm in ARMS}
    for model in models:
        del model["model"]
    draw(found, models, report.RESULTS / "rm_ppo.png")
    body, goals = judge(found, models)
    data = {"goals": goals, "reward_models": models, "runs": runs, "seconds": time.perf_counter() - began}
    report.write("rm_ppo", "Preferences, a reward model, PPO", body, data)
    return 0 if all(goals.values()) else 1


def supervised(home: Path) -> Path:
    """The policy that all begins with, the model after the task's warm-up: it imitates demonstrations of every mood."""
    run_dir = home / "start"
    novarl("rl", f"task={TASK}", "seed=0", "steps=1", *QUIET, f"run_dir={run_dir}")
    (warm,) = (run_dir / "checkpoints").glob("warmup-*")
    return warm / "model"


def answers(
    model: Path, split: Split, *, samples: int, seed: int, judge: Path | None = None, count: int = HELD_OUT
) -> list[Scored]:
    """Sampled answers to `count` prompts of a split, with the parts of their gold and what the reward model `judge`
    says of them (`proxy`)."""
    task, policy = find_task(TASK), load(str(model), device="cpu")
    rows = task.rows(split, None if split == "train" else count)
    random.Random(seed).shuffle(rows)
    prompts, _ = load_rl(raw(rows[:count]), tokenizer=policy.tokenizer, max_length=policy.context)
    sampling = Sampling(max_tokens=task.max_tokens)
    engine = local_engine(policy)
    sampler = Sampler(
        engine=engine,
        env=SingleTurn,
        tokenizer=policy.tokenizer,
        sampling=sampling,
        max_turns=1,
        context=policy.context,
        apply_chat_template=True,
        samples=samples,
        seed=seed,
    )
    parts = {name: find_reward(source) for name, source in GOLD.items()}
    if judge is not None:
        parts["proxy"] = find_reward(f"model:{judge}")
    rewards = RewardSet(parts)
    found = asyncio.run(rewards.score(sampler.evaluate(list(enumerate(prompts)), samples, sampling)))
    engine.close()
    rewards.close()
    return found


def gold(one: Scored) -> float:
    """The sum of its parts."""
    return sum(one.rewards[name] for name in GOLD)


def reward_model(home: Path, start: Path, seed: int) -> dict[str, Any]:
    """Preferences between the start's own answers, the reward model that learns from them, and how well it agrees with
    gold on held-out answers of the start."""
    data, run_dir = home / f"pairs-{seed}.jsonl", home / f"rm-{seed}"
    sampled, draw_lots = answers(start, "train", samples=2, seed=seed, count=PROMPTS), random.Random(seed)
    pairs, wrong = [], 0
    for one, two in zip(sampled[::2], sampled[1::2], strict=True):
        if gold(one) == gold(two):
            continue
        better, worse = (one, two) if gold(one) > gold(two) else (two, one)
        flipped = draw_lots.random() < FLIPPED
        better, worse, wrong = (worse, better, wrong + 1) if flipped else (better, worse, wrong)
        prompt = better.rollout.prompt.messages[-1]["content"]
        pairs.append({"prompt": prompt, "chosen": better.rollout.text, "rejected": worse.rollout.text})
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    words = (f"data={data}", f"model={start}", f"seed={seed}", f"run_dir={run_dir}", *RM)
    novarl("rm", *words, *(word for word in QUIET if not word.startswith("eval")))
    model = run_dir / "checkpoints" / "latest" / "model"
    held_out = answers(start, "held_out", samples=1, seed=seed, judge=model)
    scores = [(one.rewards["proxy"], gold(one)) for one in held_out]
    ordered = [(x > u) == (y > v) for x, y in scores for u, v in scores if y != v]
    found = {
        "seed": seed,
        "model": model,
        "pairs": len(pairs),
        "wrong": wrong,
        "agreement": fmean(ordered),
        "start": fmean(y for _, y in scores),
        "proxy": [fmean(x for x, _ in scores), stdev(x for x, _ in scores)],
        "gold": [fmean(y for _, y in scores), stdev(y for _, y in scores)],
        "seconds": summary(run_dir)["seconds"],
    }
    print(json.dumps({key: value for key, value in found.items() if key != "model"}), flush=True)
    return found


def optimise(home: Path, start: Path, judge: Path, arm: str, seed: int) -> dict[str, Any]:
    """PPO on the reward model. The gold rewards have weight 0: they are recorded of every sampled answer, no more."""
    run_dir = home / f"{arm}-{seed}"
    seen = ", ".join(f"{name}: {{source: '{source}', weight: 0.0}}" for name, source in GOLD.items())
    words = [
        "rl",
        f"task={TASK}",
        f"model={start}",
        f"seed={seed}",
        f"steps={STEPS}",
        f"run_dir={run_dir}",
        f"reward={{proxy: {{source: 'model:{judge}'}}, {seen}}}",
        "log.rollouts_every=null",
        *QUIET,
        *PPO,
        *ARMS[arm],
    ]
    command = [sys.executable, "-m", "novarl", *words]
    done = subprocess.run(command, text=True, capture_output=True, check=False, env=dict(os.environ))
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    updates: dict[int, list[dict[str, Any]]] = {}
    for record in metrics(run_dir):
        updates.setdefault(int(record["step"]), []).append(record)
    steps = [updates[step] for step in sorted(updates)]
    after = answers(run_dir / "checkpoints" / "latest" / "model", "held_out", samples=1, seed=seed, judge=judge)
    found = {
        "arm": arm,
        "seed": seed,
        "proxy": [step[0]["rewards/proxy_mean"] for step in steps],
        "gold": [sum(step[0][f"rewards/{name}_mean"] for name in GOLD) for step in steps],
        # Before its first update a step's policy is the one that sampled, so that this is its KL, without bias.
        "kl": [step[0]["kl_to_ref"] * step[0]["length_mean"] for step in steps],
        # What the controller sees: another estimate (k3) on the same answers.
        "rollout_kl": [step[-1]["rollout_kl_sequence"] for step in steps],
        "coef": [step[-1]["kl_coef"] for step in steps],
        "after": {"gold": fmean(map(gold, after)), "proxy": fmean(one.rewards["proxy"] for one in after)},
        "says": [one.rollout.text for one in after[:4]],
        "seconds": summary(run_dir)["seconds"],
    }
    print(json.dumps({"run": run_dir.name, **found["after"], "says": found["says"][0]}), flush=True)
    return found


def smooth(curve: Sequence[float]) -> list[float]:
    """Means over `WINDOW` steps."""
    return [fmean(curve[at : at + WINDOW]) for at in range(len(curve) - WINDOW + 1)]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of Student's 95 % interval."""
    wide = STUDENT[len(values)] * stdev(values) / math.sqrt(len(values)) if values[1:] else math.inf
    return fmean(values), wide


def falls(run: Mapping[str, Any]) -> tuple[float, float]:
    """From the peak of gold to the end of a run: by how much gold has fallen, and the reward model's score risen."""
    gold_curve, proxy = smooth(run["gold"]), smooth(run["proxy"])
    peak = max(range(len(gold_curve)), key=gold_curve.__getitem__)
    return gold_curve[peak] - gold_curve[-1], proxy[-1] - proxy[peak]


def judge(
    found: Mapping[str, Sequence[Mapping[str, Any]]], models: Sequence[Mapping[str, Any]]
) -> tuple[str, dict[str, bool]]:
    """The report, and which goals are met."""
    starts = [model["start"] for model in models]
    rises = [run["after"]["gold"] - start for run, start in zip(found["controlled"], starts, strict=True)]
    rise, slack = interval(rises)
    within = [fmean(LOW <= kl <= HIGH for kl in run["kl"][SETTLED:]) for run in found["controlled"]]
    fall, fall_slack = interval([falls(run)[0] for run in found["free"]])
    grown = [falls(run)[1] for run in found["free"]]
    goals = {
        "gold": rise - slack > 0,
        "band": min(within) >= 0.8,
        "over-optimisation": fall - fall_slack > 0 and fmean(grown) > 0,
    }
    rows = []
    for place, model in enumerate(models):
        held, free = (found[arm][place] for arm in ARMS)
        numbers = [model["start"], held["after"]["gold"], free["after"]["gold"]]
        proxies = [model["proxy"][0], held["after"]["proxy"], free["after"]["proxy"]]
        rows.append([model["seed"], model["pairs"], model["agreement"], *numbers, *proxies, f"{within[place]:.0%}"])
    table = report.table(
        [
            "seed",
            "pairs",
            "agreement",
            "gold: start",
            "controlled",
            "free",
            "proxy: start",
            "controlled",
            "free",
            "band",
        ],
        rows,
    )
    marks = {name: "met" if goal else "NOT met" for name, goal in goals.items()}
    text = f"""
{len(models)} seeds. One policy imitates the demonstrations of `task={TASK}`. For each seed it gives two answers to each
of {PROMPTS} prompts; gold, the sum of the task's three scripted rewards less 1 for each word that no demonstration has,
says which is better, ties are left out and {FLIPPED:.0%} of the labels are turned round. `novarl rm` learns from these
pairs, starting from the policy, and `novarl rl algo=ppo reward=model:RUN` from the reward model: {STEPS} steps of 64
answers. Gold has weight 0 there: it is only recorded.

"Agreement" is the share of pairs of held-out answers of the start that the reward model orders as gold
does; "band" the share of steps after the {SETTLED}th with KL in its band (the mean of log pi - log ref on the answers
as they are sampled). Gold and proxy (the reward model's score) are means over sampled answers to {HELD_OUT} held-out
prompts, at the start and at the end.

{table}

* **Gold rises under control** by {rise:.2f} (95 % interval {rise - slack:.2f} to {rise + slack:.2f}): goal, an interval
  above 0, {marks["gold"]}.
* **KL in its band** of {LOW:g} to {HIGH:g} nats per answer (target {TARGET:g}, `controller_type=exponential`)
  in {min(within):.0%} or more of the steps after the {SETTLED}th: goal, 80 %, {marks["band"]}.
* **Without control** gold falls from its peak by {fall:.2f} ({fall - fall_slack:.2f} to {fall + fall_slack:.2f}) on the
  sampled answers, while the proxy changes by {fmean(grown):+.2f} from that peak on: goal, gold falls and the proxy
  rises, {marks["over-optimisation"]}.

What the policies of seed {models[0]["seed"]} say at the end, to the same held-out prompts:

| controlled | free |
| --- | --- |
"""
    text += "\n".join(
        f"| {_shown(one)} | {_shown(two)} |"
        for one, two in zip(found["controlled"][0]["says"], found["free"][0]["says"], strict=True)
    )
    caption = (
        "Gold and proxy of the sampled answers, in standard deviations of the start's answers; thin lines are seeds, "
        "thick ones their mean."
    )
    return f"{text}\n\n![Gold and proxy](rm_ppo.png)\n\n{caption}", goals


def _shown(text: str) -> str:
    """A sampled text in a cell of a table."""
    return "`" + json.dumps(text)[1:-1].replace("`", "'").replace("|", "/") + "`"


def draw(found: Mapping[str, Sequence[Mapping[str, Any]]], models: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Gold and proxy against steps without and with control, gold against KL, and KL against steps with its band."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 7.2), layout="constrained")
    panels = figure.subplots(2, 2)
    colours = {"gold": "#b7791f", "proxy": "#2563eb"}
    titles = {"free": "without KL control", "controlled": "KL controlled"}
    for panel, arm in zip(panels[0], ("free", "controlled"), strict=True):
        for name, colour in colours.items():
            curves = []
            for run, model in zip(found[arm], models, strict=True):
                mean, deviation = model[name]
                curves.append([(value - mean) / deviation for value in smooth(run[name])])
                panel.plot(range(WINDOW, STEPS + 1), curves[-1], color=colour, linewidth=0.8, alpha=0.4)
            middle = [fmean(values) for values in zip(*curves, strict=True)]
            panel.plot(range(WINDOW, STEPS + 1), middle, color=colour, linewidth=2.2, label=name)
        panel.axhline(0, color="0.8", linewidth=0.8, zorder=0)
        panel.set(title=titles[arm], xlabel="step", ylabel="deviations above the start")
        panel.legend(frameon=False, loc="center right")
    low, high = (f(panel.get_ylim()[i] for panel in panels[0]) for i, f in enumerate((min, max)))
    for panel in panels[0]:
        panel.set_ylim(low, high)
    against, band = panels[1]
    for run, model in zip(found["free"], models, strict=True):
        distance = [math.sqrt(max(kl, 0.0)) for kl in smooth(run["kl"])]
        for name, colour in colours.items():
            mean, deviation = model[name]
            against.plot(
                distance,
                [(value - mean) / deviation for value in smooth(run[name])],
                color=colour,
                linewidth=1.2,
                alpha=0.7,
                marker=".",
                markersize=3,
                label=name if run is found["free"][0] else None,
            )
    against.axvspan(math.sqrt(LOW), math.sqrt(HIGH), color="0.9", label="where control holds KL")
    against.set(
        title="without KL control", xlabel="square root of KL, nats per answer", ylabel="deviations above the start"
    )
    against.legend(frameon=False)
    for arm, colour in (("free", "#dc2626"), ("controlled", "#059669")):
        for run in found[arm]:
            label = titles[arm] if run is found[arm][0] else None
            band.plot(
                range(1, STEPS + 1),
                [max(kl, 0.3) for kl in run["kl"]],
                color=colour,
                linewidth=1.0,
                alpha=0.8,
                label=label,
            )
    band.axhspan(LOW, HIGH, color="0.9", label="band")
    band.set(yscale="log", title="KL of the policy that sampled", xlabel="step", ylabel="nats per answer")
    band.legend(frameon=False)
    for panel in panels.flat:
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    raise SystemExit(main())
