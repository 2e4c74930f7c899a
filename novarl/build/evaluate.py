"""`novarl eval`: how good a model is on held-out rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from novarl.build.judge import Judge, write_samples
from novarl.build.machine import start
from novarl.build.resolve import DATA_MAX_TOKENS
from novarl.build.rewards import build_env, build_rewards
from novarl.build.rows import rl_rows
from novarl.build.sampling import Sampler, local_engine
from novarl.build.session import open_run
from novarl.config.load import to_yaml
from novarl.config.tree import EvalConfig
from novarl.core.rundir import environment
from novarl.core.types import Sampling
from novarl.models.load import load
from novarl.observe.summary import render_summary
from novarl.tasks.registry import find_task


def run_eval(config: EvalConfig) -> dict[str, Any]:
    """Evaluate, print the score with its interval, and return what summary.json holds."""
    device, ranks = start(config.device, config.threads, config.seed)
    opened = open_run("eval", config.run_dir, None, ranks)
    task = find_task(config.task, dict(config.task_options)) if config.task else None
    policy = load(config.model, seed=config.seed, dtype=config.dtype, device=device)
    max_tokens = config.rollout.max_tokens or (task.max_tokens if task else DATA_MAX_TOKENS)
    rows = rl_rows(config, task, policy, max_tokens=max_tokens)
    rewards = build_rewards(config, task)
    engine = local_engine(policy, max_batch=config.rollout.max_batch)
    sampling = Sampling(
        temperature=config.eval.temperature,
        top_k=config.eval.top_k,
        top_p=config.eval.top_p,
        min_p=config.eval.min_p,
        max_tokens=max_tokens,
        stop=tuple(config.rollout.stop),
    )
    sampler = Sampler(
        engine=engine,
        env=build_env(config),
        tokenizer=policy.tokenizer,
        sampling=replace(sampling, temperature=0.0),
        max_turns=config.rollout.max_turns,
        context=policy.context,
        apply_chat_template=config.apply_chat_template,
        samples=1,
        seed=config.seed,
    )
    try:
        found = Judge(rows.held_out, sampler, rewards, ranks, sampling, config.eval.k)()
    finally:
        rewards.close()
        engine.close()
    folder = opened.rundir.path
    summary = {
        "status": "done",
        "command": "eval",
        "task": config.task,
        "rows": rows.summary(),
        "after": found.summary(),
        "paths": {"run_dir": str(folder), "samples": str(folder / "samples.md")},
    }
    if ranks.rank == 0:
        opened.rundir.create()
        (folder / "config.yaml").write_text(to_yaml(config))
        opened.rundir.write_json("manifest.json", {**environment(), "kind": "eval", "seed": config.seed})
        write_samples(folder / "samples.md", found.rows)
        opened.rundir.write_json("summary.json", summary)
        print(render_summary(summary), end="")
    ranks.stop()
    return summary
