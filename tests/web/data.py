"""Runs for the browser: one that learns, and one whose texts are hostile. Written with RunWriter, without torch."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from novarl.observe.writer import RunWriter

HOSTILE = (
    "<script>window.hacked=1</script>",
    '<img src=x onerror="window.hacked=1">',
    "\u202egnirts desrever\u202c",
    "a\x1b[31mred\x1b[0m",
    '"><svg/onload=window.hacked=1>',
    "</script><script>window.hacked=1</script>",
)

PEOPLE = ("Ada", "Noor", "Emil", "Tara", "Juan", "Mei")


def learning_run(
    folder: Path, *, seed: int = 0, steps: int = 60, groups: int = 6, until: int | None = None
) -> RunWriter:
    """Sums that are answered better and better, `until` this step; the run is left open."""
    values = random.Random(seed)
    config = {"algo": "grpo", "seed": seed, "model": "small", "optim": {"lr": 1e-5 * (1 + seed)}, "kl": {"coef": 0.02}}
    manifest = {"seed": seed, "device": "cpu"}
    run = RunWriter(folder, writer="example", steps=steps, config=config, manifest=manifest)
    for step in range(1, (until or steps) + 1):
        add_step(run, step, steps, values, groups)
    return run


def add_step(run: RunWriter, step: int, steps: int, values: random.Random, groups: int = 6) -> None:
    """One more step of a run that learns."""
    skill = 1 / (1 + math.exp(5 - 9 * step / steps))
    reward = min(1.0, max(0.0, 0.12 + 0.8 * skill + values.gauss(0, 0.035)))
    metrics = {
        "reward_mean": reward,
        "reward_std": 0.45 - 0.25 * skill,
        "kl": 10 ** (-3 + 0.8 * skill + values.gauss(0, 0.2)),
        "kl_mean": 0.4 * skill + values.random() * 0.03,
        "entropy": 1.4 - 0.8 * skill + values.gauss(0, 0.03),
        "length_mean": 18 + 6 * skill + values.gauss(0, 0.5),
        "clip_fraction": 0.05 + 0.3 * skill * values.random(),
        "grad_norm": 10 ** values.gauss(0, 0.15),
        "total_loss": values.gauss(0, 0.02),
        "lr": 1e-5,
        "tokens_per_second": 900 + values.gauss(0, 40),
        "time/rollout_s": 2.1 + values.random(),
        "time/reward_s": 0.2,
        "time/update_s": 1.4 + values.random() / 2,
        "time/step_s": 4.3,
        "memory_rss_mb": 1840.0,
    }
    run.rollouts(step, [answer for group in range(groups) for answer in _sums(group, skill, values)])
    if step == int(0.7 * steps):
        run.event(
            "alert",
            alert="kl_explosion",
            message="KL of one update is above 0.01 nats per token. Usual fix: a lower learning rate.",
        )
    run.step(step, metrics)


def _sums(group: int, skill: float, values: random.Random) -> list[dict[str, Any]]:
    one, other = 13 + 7 * group, 28 + 5 * group
    question = f"{PEOPLE[group % 6]} has {one} coins and gets {other} more. How many are there?"
    drawn = []
    for _ in range(4):
        right = values.random() < skill
        said = one + other if right else one + other + values.choice((-10, 10, 1))
        text = f"First {one} + {other}.|That makes {said}.|Answer: {said}"
        lines = [_words(part) for part in text.split("|")]
        pieces = [*lines[0], "\n", *lines[1], "\n", *lines[2], "<eos>"]
        drawn.append((pieces, float(right), "".join(pieces[:-1])))
    mean = sum(reward for _, reward, _ in drawn) / 4
    return [
        {
            "prompt_id": f"sum/{group}",
            "group": group,
            "index": index,
            "prompt": question,
            "text": text,
            "answer": str(one + other),
            "reward": reward,
            "rewards": {"exact": reward, "format": 1.0},
            "finish_reason": "stop",
            "columns": columns(pieces, reward - mean, values),
        }
        for index, (pieces, reward, text) in enumerate(drawn)
    ]


def _words(text: str) -> list[str]:
    words = text.split(" ")
    return [words[0], *(f" {word}" for word in words[1:])]


def columns(pieces: Sequence[str], advantage: float, values: random.Random) -> dict[str, list[Any]]:
    """Every column of the format, with plausible numbers."""
    old = [-abs(values.gauss(0, 0.7)) - 0.01 for _ in pieces]
    return {
        "tokens": [100 + sum(map(ord, piece)) % 900 for piece in pieces],
        "pieces": list(pieces),
        "turns": [0] * len(pieces),
        "behavior_logp": [value * (1 + values.gauss(0, 1e-3)) for value in old],
        "old_logp": old,
        "logp": [value * (1 + values.gauss(0, 0.05)) for value in old],
        "ref_logp": [value * values.uniform(0.5, 2.0) for value in old],
        "entropy": [abs(values.gauss(0, 0.8)) for _ in pieces],
        "loss": [-advantage * (1 + values.gauss(0, 0.05)) for _ in pieces],
        "values": [values.random() for _ in pieces],
        "advantages": [advantage] * len(pieces),
        "returns": [values.random() for _ in pieces],
        "token_reward": [values.gauss(0, 0.2) for _ in pieces],
    }


def hostile_run(folder: Path, steps: int = 3) -> None:
    """Every text of it tries to be more than text. Answer 0 of each group has two turns and a tool call."""
    values = random.Random(0)
    with RunWriter(folder, writer="<b>trainer</b>", config={"algo": HOSTILE[0], "nested": {"b": HOSTILE[2]}}) as run:
        for step in range(1, steps + 1):
            run.step(step, {"reward_mean": 0.1 * step, "entropy": math.nan if step == 2 else 1.0, "x/<img>": 1.0})
            run.event("alert", alert="odd", message=f"odd {HOSTILE[0]} {HOSTILE[2]}")
            run.rollouts(step, [row for group, bad in enumerate(HOSTILE) for row in _hostile_group(group, bad, values)])


def _hostile_group(group: int, bad: str, values: random.Random) -> list[dict[str, Any]]:
    asked = [{"role": "system", "content": f"Be kind. {bad}"}, {"role": "user", "content": f"What is 2+2? {bad}"}]
    pieces = ["call ", bad, "!", "it", " is", " 4", "<eos>"]
    used = {"function": {"name": f"calc{bad}", "arguments": {"expression": bad}}}
    talk = [
        *asked,
        {"role": "assistant", "content": f"call {bad}!", "tool_calls": [used]},
        {"role": "tool", "name": bad, "content": f"4 {bad}"},
        {"role": "assistant", "content": "it is 4"},
    ]
    given: dict[str, Any] = {"prompt_id": f"p{group}{bad}", "group": group, "answer": bad, "extra": {bad: bad}}
    two = columns(pieces, 0.5, values) | {"turns": [0, 0, 0, 1, 1, 1, 1]}
    return [
        {
            **given,
            "index": 0,
            "messages": talk,
            "text": "it is 4",
            "reward": 1.0,
            "rewards": {bad: 1.0},
            "columns": two,
        },
        {
            **given,
            "index": 1,
            "messages": [*asked, {"role": "assistant", "content": bad}],
            "text": bad,
            "reward": None,
            "status": "failed",
            "finish_reason": "length",
            "error": f"ValueError: {bad}",
        },
    ]
