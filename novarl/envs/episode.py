"""One episode: the policy and an environment talk until one of them is done, token by token as the policy saw it.

Text is never turned back into tokens for training. A turn's sampled tokens stay as they are; what the environment
adds is what the next rendering of the conversation has beyond them, and is masked out. Where the rendering does not
begin with the tokens so far (a template that drops earlier thoughts, text that decodes to other tokens), the context
has been rewritten: what was sampled so far stays one sequence, and a new one begins with the tokens the policy now
sees.
"""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable, Collection, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, TypeVar

from novarl.core.types import (
    Completion,
    Engine,
    Env,
    Message,
    Prompt,
    Role,
    Rollout,
    Sampling,
    Sequence,
    Status,
    Tokenizer,
)
from novarl.data.render import render_prompt, turn_text
from novarl.data.template import turn_ends

T = TypeVar("T")

UNSAMPLED = -1
"""The version of weights of a token that no weights chose."""


class EnvironmentFailed(Exception):
    """The environment, or what it said, raised; the message holds the traceback."""


@dataclass(slots=True)
class Stretch:
    """A sequence under construction: columns of equal length."""

    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    support: list[bytes] = field(default_factory=list)

    def read(self, tokens: Seq[int]) -> None:
        """Add tokens that the policy is given."""
        self.tokens += tokens
        self.mask += [False] * len(tokens)
        self.logp += [0.0] * len(tokens)
        self.kept += [0.0] * len(tokens)
        self.versions += [UNSAMPLED] * len(tokens)
        self.support += [b""] * len(tokens)

    def write(self, completion: Completion) -> None:
        """Add tokens that the policy chose."""
        self.tokens += completion.tokens
        self.mask += [True] * len(completion.tokens)
        self.logp += completion.logp
        self.kept += completion.kept_logmass
        self.versions += completion.versions
        self.support += completion.support or [b""] * len(completion.tokens)

    def done(self) -> Sequence:
        return Sequence(
            tokens=tuple(self.tokens),
            mask=tuple(self.mask),
            behavior_logp=tuple(self.logp),
            kept_logmass=tuple(self.kept),
            versions=tuple(self.versions),
            support=tuple(self.support) if any(self.support) else None,
        )


@dataclass(slots=True)
class Episode:
    """What has happened so far in one episode."""

    stretches: list[Stretch] = field(default_factory=lambda: [Stretch()])
    messages: list[Message] = field(default_factory=list)
    text: str = ""
    turns: int = 0
    env_reward: float | None = None
    info: dict[str, Any] = field(default_factory=dict)

    def show(self, tokens: Seq[int]) -> None:
        """Put the policy before these tokens, as a continuation of what it saw, or else as a new stretch."""
        stretch = self.stretches[-1]
        known = len(stretch.tokens)
        if list(tokens[:known]) != stretch.tokens:
            stretch, known = Stretch(), 0
            self.stretches.append(stretch)
        stretch.read(tokens[known:])


async def run_episode(
    engine: Engine,
    env: Env,
    prompt: Prompt,
    *,
    tokenizer: Tokenizer,
    sampling: Sampling,
    group: int,
    index: int,
    role: Role = "train",
    max_turns: int = 1,
    context: int | None = None,
    apply_chat_template: bool = True,
    ends: Collection[int] | None = None,
) -> Rollout:
    """Let the policy answer `prompt` in `env`, for at most `max_turns` turns of its own.

    context: the longest sequence that the model takes, in tokens; an episode that would fill it ends with the turn
        before, as one does where its turns are used up (None: never checked)
    ends: the tokens at which the engine ends a turn; such a token is not part of the turn's text, as all others are,
        special or not (None: eos, and what the chat template writes at the end of a turn)

    The first turn's request is keyed "PROMPT-ID/INDEX", turn t > 0 "PROMPT-ID/INDEX/t". The status is `done` where the
    environment ended the episode, `truncated` where a limit did (finish_reason length, turns or context), and `failed`
    where the environment raised, with the traceback in `info["error"]`. The rewards that the environment gave are
    summed in `info["env_reward"]`. Errors of the engine are ours and are raised.
    """
    episode = Episode()

    async def ask() -> Completion:
        key = f"{prompt.id}/{index}" + (f"/{episode.turns}" if episode.turns else "")
        return await engine.sample(tuple(episode.stretches[-1].tokens), sampling, key=key)

    async def render() -> Seq[int]:
        # The prompt was rendered once; an environment that adds to it (the tools on offer, say) is rendered anew.
        if tuple(episode.messages) == tuple(prompt.messages):
            return prompt.tokens
        return render_prompt(
            tokenizer, episode.messages, apply_chat_template=apply_chat_template, template_kwargs=prompt.template_kwargs
        )

    stops = {*(turn_ends(tokenizer) if ends is None else ends), *sampling.stop_tokens}

    def read(completion: Completion) -> str:
        ended = completion.finish_reason == "stop" and completion.tokens[-1] in stops
        stretch = episode.stretches[-1].tokens
        asked = stretch[: len(stretch) - len(completion.tokens)]
        return turn_text(tokenizer, asked, completion.tokens, ended=ended, apply_chat_template=apply_chat_template)

    try:
        talk = _converse(episode, env, prompt, ask=ask, render=render, read=read, max_turns=max_turns, context=context)
        status, reason = await talk
    except EnvironmentFailed as failure:
        status, reason = "failed", "error"
        episode.info["error"] = str(failure)
    if episode.env_reward is not None:
        episode.info["env_reward"] = episode.env_reward
    return Rollout(
        prompt=prompt,
        group=group,
        index=index,
        sequences=tuple(stretch.done() for stretch in episode.stretches if any(stretch.mask)),
        messages=tuple(episode.messages),
        text=episode.text,
        status=status,
        finish_reason=reason,
        role=role,
        info=episode.info | {"turns": episode.turns},
    )


async def _converse(
    episode: Episode,
    env: Env,
    prompt: Prompt,
    *,
    ask: Callable[[], Awaitable[Completion]],
    render: Callable[[], Awaitable[Seq[int]]],
    read: Callable[[Completion], str],
    max_turns: int,
    context: int | None,
) -> tuple[Status, str]:
    """The conversation itself: how it ended, and why."""
    episode.messages += await _blamed(env.reset(prompt))
    seen = len(episode.messages)
    while True:
        tokens = await _blamed(render())
        if context is not None and len(tokens) >= context:
            del episode.messages[seen:]
            return "truncated", "context"
        episode.show(tokens)
        completion = await ask()
        episode.stretches[-1].write(completion)
        episode.text = read(completion)
        episode.messages.append({"role": "assistant", "content": episode.text})
        episode.turns += 1
        seen = len(episode.messages)
        # Also the last turn is put before the environment: it may reward it, and only it knows whether it is content.
        step = await _blamed(env.step(tuple(episode.messages)))
        if step.reward is not None:
            episode.env_reward = (episode.env_reward or 0.0) + step.reward
        episode.info |= step.info
        if completion.finish_reason == "length":
            return "truncated", "length"
        if step.done or not step.messages:
            return "done", completion.finish_reason
        if episode.turns >= max_turns:
            return "truncated", "turns"
        episode.messages += step.messages


async def _blamed(work: Awaitable[T]) -> T:
    """Await something of the environment's; whatever it raises is this episode's failure, its cause kept."""
    try:
        return await work
    except Exception as error:
        raise EnvironmentFailed(
            f"the environment raised {type(error).__name__}: {error}\n{traceback.format_exc()}"
        ) from error
