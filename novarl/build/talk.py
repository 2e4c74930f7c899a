"""`novarl sample`: ask a model."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Iterator

from novarl.build.chat import with_chat
from novarl.build.machine import start
from novarl.build.sampling import local_engine
from novarl.build.trust import trust_of
from novarl.config.tree import SampleConfig
from novarl.core import collector
from novarl.core.errors import NovaError, visible
from novarl.core.types import Completion, Sampling
from novarl.data.render import render_prompt, turn_text
from novarl.models.heads import refuse_reward_model
from novarl.models.load import load
from novarl.observe.sinks.console import leave


def run_sample(config: SampleConfig) -> None:
    """Answer the prompt, or every line of the standard input, on the standard output."""
    device, _ = start(config.device, config.threads, config.seed)
    refuse_reward_model(config.model)
    policy = with_chat(
        load(config.model, seed=config.seed, dtype=config.dtype, device=device, trust=trust_of(config)), config
    )
    engine = local_engine(policy)
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

    async def answers(prompt: str, number: int) -> list[tuple[Completion, str]]:
        tokens = render_prompt(
            policy.tokenizer,
            ({"role": "user", "content": prompt},),
            apply_chat_template=config.apply_chat_template,
            template_kwargs=policy.template_kwargs,
        )
        requests = [engine.sample(tokens, sampling, key=f"sample/{number}/{index}") for index in range(config.n)]
        return [(found, said(tokens, found)) for found in await asyncio.gather(*requests)]

    def said(prompt: tuple[int, ...], found: Completion) -> str:
        ended = found.finish_reason == "stop" and found.tokens[-1] in policy.eos_ids
        chat = config.apply_chat_template
        return turn_text(policy.tokenizer, prompt, found.tokens, ended=ended, apply_chat_template=chat)

    shown = visible if sys.stdout.isatty() else str  # a program gets the text as it is
    try:
        for number, prompt in enumerate(_prompts(config.prompt, sys.stdin)):
            for found, text in asyncio.run(answers(prompt, number)):
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


def _prompts(given: str | None, lines: Iterable[str]) -> Iterator[str]:
    if given is not None:
        yield given
    else:
        yield from (line.rstrip("\n") for line in lines if line.strip())
