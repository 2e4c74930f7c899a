"""`novarl sample`: ask a model."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from novarl.compose.chat import with_chat
from novarl.compose.trust import trust_of
from novarl.config.tree import SampleConfig
from novarl.core import collector
from novarl.core.errors import NovaError, visible
from novarl.core.event_loop import EventLoop
from novarl.core.types import Sampling
from novarl.models.heads import refuse_reward_model
from novarl.models.load import load
from novarl.observe.sinks.console import leave
from novarl.run.answers import ask, messages_of
from novarl.run.machine import flush_denormals, start
from novarl.run.sampler import local_engine


def run_sample(config: SampleConfig) -> None:
    """Answer the prompt, or every line of the standard input, on the standard output."""
    device, _ = start(config.device, config.threads, config.seed)
    refuse_reward_model(config.model)
    policy = with_chat(
        load(config.model, seed=config.seed, dtype=config.dtype, device=device, trust=trust_of(config)), config
    )
    engine, loop = local_engine(policy), EventLoop(flush_denormals)
    collector.started()
    talk = config.sampling
    sampling = Sampling(
        temperature=talk.temperature,
        top_k=talk.top_k,
        top_p=talk.top_p,
        min_p=talk.min_p,
        max_tokens=talk.max_tokens,
        stop=tuple(talk.stop),
        seed=config.seed,
    )

    count, cut, left = 0, 0, False

    shown = visible if sys.stdout.isatty() else str  # a program gets the text as it is
    try:
        for number, prompt in enumerate(_prompts(config.prompt, sys.stdin)):
            for found, text in loop.run(
                ask(policy, engine, messages_of(prompt), sampling, number, config.n, config.apply_chat_template)
            ):
                print(shown(text), flush=True)
                count += 1
                cut += found.finish_reason == "length" and len(found.tokens) < talk.max_tokens
    except BrokenPipeError:  # whoever read the answers, such as `head`, has enough of them
        left = True
        leave(sys.stdout)
    if count == 0 and not left:
        raise NovaError(
            "there is nothing to answer", where="prompt", fix="write prompt='...', or pipe one prompt a line in"
        )
    if cut:
        print(
            f"novarl: {cut} of {count} answers ended before {talk.max_tokens} tokens, where the model's context of "
            f"{policy.limit} was full",
            file=sys.stderr,
        )
    engine.close()
    loop.close()


def _prompts(given: str | None, lines: Iterable[str]) -> Iterator[str]:
    if given is not None:
        yield given
    else:
        yield from (line.rstrip("\n") for line in lines if line.strip())
