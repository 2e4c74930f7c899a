"""`novarl sample`: generate answers to prompts."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from novarl.compose.chat import with_chat
from novarl.compose.sampling import sampling_of
from novarl.compose.trust import trust_of
from novarl.config.tree import SampleConfig
from novarl.core import collector
from novarl.core.errors import NovaError, visible
from novarl.core.event_loop import EventLoop
from novarl.models.heads import refuse_reward_model
from novarl.models.load import load
from novarl.observe.sinks.console import leave
from novarl.run.answers import ask, messages_of
from novarl.run.lineage import runs_behind
from novarl.run.machine import flush_denormals, start
from novarl.run.sampler import local_engine
from novarl.tasks.registry import TASKS, find_task


def run_sample(config: SampleConfig) -> None:
    """Print answers to the prompt, or to each line of the standard input."""
    device, _ = start(config.device, config.threads, config.seed)
    refuse_reward_model(config.model)
    policy = with_chat(
        load(config.model, seed=config.seed, dtype=config.dtype, device=device, trust=trust_of(config)), config
    )
    engine, loop = local_engine(policy), EventLoop(flush_denormals)
    collector.started()
    talk = config.sampling
    sampling = sampling_of(talk, max_tokens=talk.max_tokens, stop=tuple(talk.stop), seed=config.seed)
    count, cut, left = 0, 0, False
    shown = visible if sys.stdout.isatty() else str  # in a pipe, the text is printed unchanged
    typed = config.prompt is None and sys.stdin.isatty()
    prompts = _typed(config.model) if typed else _prompts(config.prompt, sys.stdin)
    try:
        for number, prompt in enumerate(prompts):
            for found, text in loop.run(
                ask(policy, engine, messages_of(prompt), sampling, number, config.n, config.apply_chat_template)
            ):
                print(shown(text), flush=True)
                count += 1
                cut += found.finish_reason == "length" and len(found.tokens) < talk.max_tokens
    except BrokenPipeError:  # the reader of the answers, such as `head`, is gone
        left = True
        leave(sys.stdout)
    if count == 0 and not left and not typed:
        raise NovaError("no prompt was given", where="prompt", fix="write prompt='...', or pipe in one prompt per line")
    if cut:
        print(
            f"novarl: {cut} of {count} answers are shorter than {talk.max_tokens} tokens because the model's context "
            f"of {policy.limit} was full",
            file=sys.stderr,
        )
    engine.close()
    loop.close()


def _typed(model: str) -> Iterator[str]:
    """Prompts typed in a terminal. Prompt sign and instructions go to stderr, so that stdout has answers only."""
    print("Type a prompt and press Enter. Ctrl-D to end.", file=sys.stderr)
    if (task := str(next((config.get("task") for _, config in runs_behind(model)), None))) in TASKS:
        example = find_task(task).rows("held_out", 1)[0]["messages"][0]["content"]
        print(f"This model was trained on task={task}. Example prompt: {visible(example)}", file=sys.stderr)
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            print(file=sys.stderr)
            return
        if line.strip():
            yield line.rstrip("\n")


def _prompts(given: str | None, lines: Iterable[str]) -> Iterator[str]:
    if given is not None:
        yield given
    else:
        yield from (line.rstrip("\n") for line in lines if line.strip())
