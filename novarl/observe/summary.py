"""The final page of a run: scores before and after, findings, output paths, and commands to try next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from novarl.core.errors import wrapped

CANNOT_LEARN = frozenset({"no_signal", "always_cut", "no_gradient", "low_lr"})
"""Alerts of a run that could not learn; such a run is never reported as successful."""

LABELS = {
    "run_dir": "Output directory",
    "metrics": "Metrics",
    "logs": "Logs",
    "tensorboard": "TensorBoard",
    "checkpoints": "Checkpoints",
    "model": "Model",
    "weights": "Weights",
    "best": "Best model",
    "figures": "Curves",
    "samples": "Samples",
    "rollouts": "Rollouts",
}
ENDS = {
    "stopped": "Training was stopped early; everything is saved.",
    "unsaved": "Training ended, but the last checkpoint could not be written.",
}
FELL = "Training ended, but the held-out score is lower than before."
IDLE = "Training ended, but the model learned little or nothing. See the warnings below."
ODD = "Training ended and the held-out score improved. See the warnings below."
ROWS = ("read", "used", "truncated", "refused", "held_out")
"""The order in which row counts are printed."""
COMMAND = " " * 6
"""How a line with a command begins."""
BAR_CELLS = 24
EIGHTHS = " ▏▎▍▌▋▊▉"


def render_summary(summary: Mapping[str, Any]) -> str:
    """summary.json as a page of text, at most 80 columns wide except for long paths and commands.

    Reads `status` ("done", "stopped", "unsaved"), `before` and `after` (`score`, `interval`, `n`, `failed`,
    `pass@k`), `seconds`, `steps`, `rows`, `warmup` (`steps`, and the first and last `loss` and `accuracy`),
    `rollouts` (`sampled`, `failed`, and `flat` for the last step), `first_failure`, `findings` (`sign`, `said`,
    `cure`: `observe.stability`) and `paths` (name: path), `from_python` (the run has Python objects). Missing
    entries are skipped. The suggested commands also read `command`, `task`, `data`, `base`, `lr`, `usual_lr`,
    `max_tokens`, `usual_max_tokens` and `other_algo`.
    """
    what = "Evaluation" if summary.get("command") == "eval" else "Training"
    lines = [ENDS.get(summary.get("status", "done")) or _verdict(summary) or f"{what} completed successfully!", ""]
    if summary.get("command") == "eval":
        lines += _scores({"score": summary.get("after")})
    else:
        lines += _scores({name: summary.get(name) for name in ("before", "after")})
    if "seconds" in summary:
        lines.append(f"Total time: {summary['seconds']:.2f} seconds")
    if "steps" in summary and summary.get("command") != "eval":
        lines.append(f"Total steps: {summary['steps']}")
    if warmup := summary.get("warmup"):
        lines.append(_warmed_up(warmup))
    if rows := summary.get("rows"):
        ordered = sorted(rows.items(), key=lambda row: ROWS.index(row[0]) if row[0] in ROWS else len(ROWS))
        lines.append("Rows: " + ", ".join(f"{count:,} {kind.replace('_', ' ')}" for kind, count in ordered))
    if (rollouts := summary.get("rollouts")) and rollouts["failed"]:
        share = f"{rollouts['failed']:,} of {rollouts['sampled']:,}"
        lines.append(f"Failed rollouts (excluded from training): {share}")
        if summary.get("first_failure"):
            lines += wrapped(f"  First error: {summary['first_failure']}", hanging="    ")
    if signs := summary.get("findings"):
        lines += ["", "Warnings:"]
        for sign in signs:
            said = " ".join(f"{part}." for part in (sign["said"], sign.get("cure")) if part)
            lines += wrapped(f"- {said}", hanging="  ")
    if paths := _paths(summary):
        lines.append("")
        lines += [f"{LABELS.get(name, name.replace('_', ' ').capitalize())}: {path}" for name, path in paths.items()]
    if advice := next_steps(summary):
        lines += ["", "What to try next:"]
        for command, why in advice:
            lines += [*wrapped(f"  {why[:1].upper()}{why[1:]}:"), f"{COMMAND}{command}"]
    return "\n".join(lines) + "\n"


def _verdict(summary: Mapping[str, Any]) -> str | None:
    """The first line of a run that was not a plain success."""
    before, after = summary.get("before"), summary.get("after")
    if _fell(before, after):
        return FELL
    if CANNOT_LEARN & {finding["sign"] for finding in summary.get("findings") or ()}:
        return ODD if rose(before, after) else IDLE
    return None


def _warmed_up(warmup: Mapping[str, Any]) -> str:
    moved = [f", loss {first:.3g} → {last:.3g}" for first, last in [warmup["loss"]]] if "loss" in warmup else []
    if "accuracy" in warmup:
        moved += [f", next-token accuracy {first:.0%} → {last:.0%}" for first, last in [warmup["accuracy"]]]
    return f"Warm-up: {warmup['steps']} supervised steps{''.join(moved)} (warmup={warmup['steps']})"


def next_steps(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(command, purpose) pairs that make sense after this run, the most useful first."""
    paths = _paths(summary)
    command, task = summary.get("command", "rl"), summary.get("task")
    run, model = paths.get("run_dir", "runs/latest"), paths.get("model")
    subject = f"task={task}" if task else summary.get("data") or "data=rows.jsonl"
    base = f" model={summary['base']}" if summary.get("base") else ""
    signs = {finding["sign"] for finding in summary.get("findings") or ()}
    advice = []
    if summary.get("status") in ENDS:
        advice.append((_again(summary, resume="auto"), "resume where it stopped"))
    if (summary.get("rows") or {}).get("refused"):
        advice.append((f"grep bad_row {run}/events.jsonl", "list the rejected rows with file, line, field and reason"))
    rollouts = summary.get("rollouts") or {}
    if rollouts.get("failed"):
        advice.append((f"grep failed_rollout {run}/events.jsonl", "list the failed rollouts with their errors"))
    if _fell(summary.get("before"), summary.get("after")) and "best" in paths and command != "rm":
        advice.append((f"novarl sample model={paths['best']}", "try the checkpoint with the best held-out score"))
    if "always_cut" in signs and (longest := summary.get("max_tokens")):
        usual = summary.get("usual_max_tokens", 0)
        more, why = (usual, "the default") if usual > longest else (2 * longest, "twice as long")
        advice.append((_again(summary, **{"rollout.max_tokens": more}), f"allow longer answers ({why})"))
    if other_steps := _other_steps(summary, signs):
        advice.append(other_steps)
    if rollouts.get("flat"):
        flat = "Every group in the last step had identical rewards."
        if "rollouts" in paths:
            advice.append((f"tail {paths['rollouts']}/*.jsonl", f"{flat} Inspect the latest saved rollouts"))
        else:
            advice.append((_again(summary, **{"log.rollouts_every": 1}), f"{flat} Save the rollouts and inspect them"))
    elif _within_noise(summary.get("before"), summary.get("after")) and not signs:
        longer = 2 * summary["steps"] if "steps" in summary else "…"
        why = "train longer, since the intervals overlap and the change may be noise"
        advice.append((_again(summary, resume="auto", steps=longer), why))
    if command == "rm":
        if summary.get("loss") in ("bt", "bce"):
            advice.append((f"novarl rl {subject}{base} reward=model:{run}", "use it as the reward of an RL run"))
    elif model:
        advice.append((f"novarl sample model={model}", "chat with the trained model"))
    if command == "sft" and model:
        rewarded = "" if task else " reward=mine.py:reward_fn"
        advice.append((f"novarl rl {subject}{rewarded} model={model}", "continue with reinforcement learning"))
    elif command == "rl":
        other = summary.get("other_algo")
        if other is None:
            advice.append((_again(summary, seed=1), "compare with another seed"))
        else:
            advice.append((_again(summary, algo=other, seed=1), "compare with another algorithm and another seed"))
    elif command == "eval" and "samples" in paths:
        advice.append((f"less {paths['samples']}", "read the first answers next to the expected ones"))
    if "tensorboard" in paths:
        advice.append((f"tensorboard --logdir {paths['tensorboard']}", "see every metric as a curve in the browser"))
    return advice


TRAINERS = {"rl": "RL", "sft": "SFT", "dpo": "DPO", "rm": "RewardModel"}


def _again(summary: Mapping[str, Any], **changes: Any) -> str:
    """The command, or the Python call, that repeats the run with `changes`, or resumes it with `resume`."""
    command, run = summary.get("command", "rl"), _paths(summary).get("run_dir", "runs/latest")
    here = "resume" in changes
    if not summary.get("from_python"):
        words = [f"run_dir={run if here else 'null'}", *(f"{name}={value}" for name, value in changes.items())]
        return " ".join([f"novarl {command} {run}/config.yaml", *words])
    given = {**({"run_dir": run} if here else {}), **changes}
    arguments = [f"**{{{name!r}: {value!r}}}" if "." in name else f"{name}={value!r}" for name, value in given.items()]
    return f"novarl.{TRAINERS[command]}(…, {', '.join(arguments)}).run()"


def _other_steps(summary: Mapping[str, Any], signs: set[str]) -> tuple[str, str] | None:
    """(command, purpose) if the updates were too large or too small, or the entropy bonus too strong."""
    fell = _fell(summary.get("before"), summary.get("after"))
    if "entropy_rise" in signs and summary.get("entropy_coef"):
        return _again(summary, **{"entropy.coef": 0}), "turn off the entropy bonus, which outweighs the reward"
    if "low_lr" in signs:
        return (
            _again(summary, **{"optim.lr": float(summary["usual_lr"])}),
            f"use the default learning rate (this run: {summary['lr']:g})",
        )
    if not (lr := summary.get("lr")) or not (fell or signs & {"kl_explosion", "entropy_collapse"}):
        return None
    why, usual = "the score fell. Lower the" if fell else "lower the", summary.get("usual_lr", lr)
    if lr > 3 * usual:
        return _again(summary, **{"optim.lr": usual}), f"{why} learning rate to the default (this run: {lr:g})"
    return _again(summary, **{"optim.lr": float(f"{lr / 3:.1g}")}), f"{why} learning rate to about a third"


def _paths(summary: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(path) for name, path in (summary.get("paths") or {}).items() if path}


def _scores(measured: Mapping[str, Mapping[str, Any] | None]) -> list[str]:
    shown = {name: score for name, score in measured.items() if score}
    if any(not math.isfinite(score["score"]) for score in shown.values()):
        return ["  Held-out score: unknown (no answer could be scored)", ""]
    if not shown:
        return []
    width = max(7, *(len(f"{score['score']:.3f}") for score in shown.values()))
    shares = all(0.0 <= end <= 1.0 for score in shown.values() for end in (score["score"], *_interval(score)))
    lines = [f"  {name:<7}{_score(score, width, shares)}" for name, score in shown.items()]
    *_, last = shown.values()
    passed = {name: value for name, value in last.items() if name.startswith("pass@") and not name.endswith("interval")}
    lines += [
        f"  {name:<7}{value:{width}.3f}{_between(last.get(f'{name}_interval') or ())}" for name, value in passed.items()
    ]
    if passed:
        lines.append("  (score: greedy decoding; pass@k: sampled, correct if the reward is at least 1)")
    if len(shown) == 2:
        lines.append(f"  {'gain':<7}{shown['after']['score'] - shown['before']['score']:+z{width}.3f}")
    return [*lines, ""]


def _score(score: Mapping[str, Any], width: int, is_share: bool) -> str:
    text = f"{score['score']:{width}.3f}" + _between(_interval(score))
    if is_share:
        text += f"  {_bar(score['score'])}"
    text += f"  n={score['n']}" if "n" in score else ""
    return text + (f", {score['failed']} failed" if score.get("failed") else "")


def _interval(score: Mapping[str, Any]) -> Sequence[float]:
    """Both ends if they are finite; infinite ends are text in JSON."""
    found = [float(end) for end in score.get("interval") or ()]
    return found if all(map(math.isfinite, found)) else ()


def _between(interval: Sequence[float]) -> str:
    return f"  [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else ""


def _bar(share: float) -> str:
    full, part = divmod(round(share * BAR_CELLS * 8), 8)
    return ("█" * full + EIGHTHS[part] * (full < BAR_CELLS)).ljust(BAR_CELLS, "░").replace(" ", "░")


def _fell(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> bool:
    """Whether the interval after training lies entirely below the one before."""
    if not (before and after and before.get("interval") and after.get("interval")):
        return False
    return bool(after["interval"][1] < before["interval"][0])


def rose(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> bool:
    """Whether the interval after training lies entirely above the one before."""
    return _fell(after, before)


def _within_noise(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> bool:
    """Whether both scores were measured and their intervals overlap."""
    if not (before and after and before.get("interval") and after.get("interval")):
        return False
    return bool(before["interval"][0] <= after["interval"][1] and after["interval"][0] <= before["interval"][1])
