"""Real data from end to end: SFT, then RL on GSM8K with the small built-in model: `make test-real DATA=dir`.

A model of 6M parameters does not learn to solve word problems in minutes, and this page does not claim it. It shows
that real files can be read, that every row is accounted for, and that both runs write all their files.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.runs import metrics, novarl, summary

ROOT = Path(__file__).resolve().parent.parent
ROWS = 7473


def check(run_dir: Path, problems: list[str]) -> dict[str, Any]:
    """What a run must leave; what is wrong is added to `problems`."""
    found = summary(run_dir)
    rows = found["rows"]
    if rows["read"] != ROWS or rows["used"] + rows["refused"] != ROWS:
        problems.append(f"{run_dir.name}: rows {rows}, expected read = used + refused = {ROWS}")
    samples = (run_dir / "samples.md").read_text().count("\n## ")
    if samples != 10:
        problems.append(f"{run_dir.name}: samples.md has {samples} rows, expected 10")
    if found["status"] != "done" or not (run_dir / "checkpoints" / "latest" / "model" / "model.safetensors").is_file():
        problems.append(f"{run_dir.name}: did not end with a model")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sft-steps", type=int, default=40)
    parser.add_argument("--rl-steps", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    arguments = parser.parse_args()
    data = arguments.data / "gsm8k-train.jsonl"
    sft, rl = arguments.runs / "gsm8k-sft", arguments.runs / "gsm8k-rl"
    for folder in (sft, rl):
        shutil.rmtree(folder, ignore_errors=True)
    novarl("sft", f"data={data}", "prompt_key=question", "completion_key=answer", "model=small", "batch_size=16",
           f"steps={arguments.sft_steps}", "eval.n=100", f"run_dir={sft}", quiet=False)  # fmt: skip
    novarl("rl", f"data={data}", "prompt_key=question", "answer_key=answer", f"model={sft}/checkpoints/latest/model",
           f"reward={ROOT}/examples/gsm8k_reward.py:reward_fn", "prompts_per_rollout=4", "responses_per_prompt=4",
           "rollout.max_tokens=128", "eval.n=20", f"steps={arguments.rl_steps}", f"run_dir={rl}",
           quiet=False)  # fmt: skip
    problems: list[str] = []
    found = {"sft": check(sft, problems), "rl": check(rl, problems)}
    losses = [line["loss"] for line in metrics(sft)]
    if not losses[-1] < 0.8 * losses[0]:
        problems.append(f"gsm8k-sft: the loss went from {losses[0]:.2f} to {losses[-1]:.2f}")
    counts = ("read", "used", "truncated", "refused")
    rows = [
        [name, f["steps"], *(f["rows"][k] for k in counts), f["before"]["score"], f["after"]["score"], f["seconds"]]
        for name, f in found.items()
    ]
    body = (
        f"{(__doc__ or '').strip()}\n\n"
        + report.table(["run", "steps", "read", "used", "truncated", "refused", "before", "after", "seconds"], rows)
        + f"\n\nSFT: the loss went from {losses[0]:.3f} to {losses[-1]:.3f} nats a byte; its score is the mean "
        "log-probability of a held-out answer's byte. RL: its score is the share of right answers.\n\n"
        + ("\n".join(problems) if problems else "All files that a run promises exist.")
    )
    report.write("real", "Real data: GSM8K", body, {"runs": found, "problems": problems})
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
