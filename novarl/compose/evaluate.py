"""`novarl eval`: the score of a model on held-out rows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from novarl.compose.chat import date_notes, with_chat
from novarl.compose.resolve import DATA_MAX_TOKENS
from novarl.compose.rewards import build_env, build_rewards, close_env
from novarl.compose.rows import rl_rows
from novarl.compose.sampling import sampler_of, sampling_of
from novarl.compose.settings import run_settings
from novarl.compose.trust import trust_of
from novarl.config.load import to_yaml
from novarl.config.tree import EvalConfig
from novarl.core import collector
from novarl.core.bus import Bus
from novarl.core.errors import NovaError, visible
from novarl.core.event_loop import EventLoop
from novarl.core.rundir import RunDir, environment
from novarl.core.types import Prompt
from novarl.data.rows import Rows
from novarl.distributed.ranks import Ranks
from novarl.loops.evaluate import Evaluation
from novarl.models.heads import refuse_reward_model
from novarl.models.load import load
from novarl.observe.sinks.jsonl import JsonlSink
from novarl.observe.summary import render_summary
from novarl.run.held_out import write_rows
from novarl.run.judge import Judge, write_samples
from novarl.run.lineage import trained_on
from novarl.run.machine import flush_denormals, start
from novarl.run.resume import Opened, open_run
from novarl.run.sampler import local_engine
from novarl.tasks.registry import find_task

FILES = {"run_dir": "", "events": "events.jsonl", "samples": "samples.md"}


def run_eval(config: EvalConfig) -> dict[str, Any]:
    """Evaluate, print the score with its interval, and return what summary.json holds."""
    began = time.perf_counter()
    device, ranks = start(config.device, config.threads, config.seed)
    opened = open_run(run_settings(config, threads=config.threads), ranks)
    try:
        return _evaluate(config, opened, device, ranks, began)
    finally:
        opened.rundir.release()
        ranks.stop()


def _evaluate(config: EvalConfig, opened: Opened, device: torch.device, ranks: Ranks, began: float) -> dict[str, Any]:
    loop = EventLoop(flush_denormals)
    task = find_task(config.task, dict(config.task_options)) if config.task else None
    refuse_reward_model(config.model)
    policy = load(config.model, seed=config.seed, dtype=config.dtype, device=device, trust=trust_of(config))
    policy = with_chat(policy, config)
    max_tokens = config.rollout.max_tokens or (task.max_tokens if task else DATA_MAX_TOKENS)
    rows = rl_rows(config, task, policy, max_tokens=max_tokens)
    rewards = build_rewards(config, task, rows.held_out, device=device)
    engine = local_engine(policy, max_batch=config.rollout.max_batch)
    sampling = sampling_of(config.eval, max_tokens=max_tokens, stop=tuple(config.rollout.stop))
    sampler = sampler_of(
        policy,
        config,
        loop,
        engine=engine,
        env=build_env(config),
        sampling=replace(sampling, temperature=0.0),
        max_turns=config.rollout.max_turns,
        samples=1,
    )
    collector.started()
    try:
        found = Judge(rows.held_out, sampler, rewards, ranks, sampling, config.eval.k, config.best_of)()
    finally:
        rewards.close()
        close_env(sampler.env)
        engine.close()
        loop.close()
    if found.n == 0:
        raise NovaError(
            f"the reward failed for every row: {str(found.rows[0].error).partition(chr(10))[0]}",
            where="reward",
            fix="fix the reward function",
        )
    summary = {
        "seconds": round(time.perf_counter() - began, 3),
        "status": "done",
        "command": "eval",
        "task": config.task,
        "steps": 0,
        "rows": rows.summary(),
        "before": None,
        "after": found.summary(),
        "paths": {name: str(opened.rundir.path / file) for name, file in FILES.items()},
    }
    if ranks.rank == 0:
        unused = rows.unused.notes(rewards.reads) if config.data else []
        notes = [*unused, *_notes(config), *date_notes(policy, config)]
        if found.best is not None:
            mean, (low, high) = found.best
            chosen = f"Best of {config.eval.k} samples by reward {config.best_of}"
            notes.append(f"{chosen}: mean reward {mean:.3f} [{low:.3f}, {high:.3f}]")
        _write(config, opened.rundir, rows, found, summary, notes)
        for note in notes:
            print(visible(f"Note: {note}"))
        print(visible(render_summary(summary)), end="")
    return summary


def _notes(config: EvalConfig) -> list[str]:
    """Notes about the score."""
    run = trained_on(config.model, config.data) if config.data else None
    if run is None:
        return []
    held_out = f"The held-out score of that run is in {run / 'summary.json'}"
    return [f"The model was trained on rows of {config.data}, so the score is contaminated. {held_out}"]


def _write(
    config: EvalConfig,
    rundir: RunDir,
    rows: Rows[Prompt],
    found: Evaluation,
    summary: Mapping[str, Any],
    notes: Sequence[str],
) -> None:
    """Write the same files as a training run, except metrics."""
    rundir.create()
    rundir.write_json("manifest.json", {**environment(), "kind": "eval", "seed": config.seed})
    rundir.write_text("config.yaml", to_yaml(config))
    bus = Bus([JsonlSink(rundir.path)])
    rows.report(bus)
    for note in notes:
        bus.event("alert", message=note)
    bus.event("eval", name="after", **found.summary())
    bus.close()
    write_rows(rundir.path, 0, found)
    write_samples(rundir.path / "samples.md", found.rows)
    rundir.write_json("summary.json", summary)
