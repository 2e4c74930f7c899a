"""What rewards, environments and the next turn see of a turn: all of it but the token that ended it."""

from __future__ import annotations

import asyncio

from novarl.core.types import Completion, EnvStep, Message, Prompt, Sampling
from novarl.data.render import render_prompt
from novarl.envs.episode import run_episode
from novarl.models.byte_tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
QUESTION: Message = {"role": "user", "content": "q"}


class Says:
    """An engine that writes its lines in order."""

    def __init__(self, *lines: str) -> None:
        self.lines, self.asked = list(lines), list[str]()

    async def sample(self, tokens, sampling: Sampling, *, key: str) -> Completion:
        self.asked.append(TOKENIZER.decode(tokens))
        answer = tuple(TOKENIZER.encode(self.lines[len(self.asked) - 1]))
        zeros = (0.0,) * len(answer)
        return Completion(answer, zeros, zeros, (0,) * len(answer), "stop" if answer[-1] == 257 else "length")


class Twice:
    """Asks once more."""

    async def reset(self, prompt: Prompt) -> tuple[Message, ...]:
        return prompt.messages

    async def step(self, messages) -> EnvStep:
        return EnvStep(({"role": "user", "content": "more"},), done=False) if len(messages) < 3 else EnvStep()


def test_special_tokens_stay_and_the_end_goes() -> None:
    engine = Says("<|tool|>say 1<pad>no<eos>", "b<|tool|>")
    prompt = Prompt("p", render_prompt(TOKENIZER, [QUESTION]), (QUESTION,))
    rollout = asyncio.run(
        run_episode(engine, Twice(), prompt, tokenizer=TOKENIZER, sampling=Sampling(), group=0, index=0, max_turns=2)  # type: ignore[arg-type]
    )
    assert rollout.messages[1]["content"] == "<|tool|>say 1<pad>no"
    assert engine.asked[1] == "<|user|>q<eos><|assistant|><|tool|>say 1<pad>no<eos><|user|>more<eos><|assistant|>"
    assert rollout.text == "b<|tool|>", "a turn cut by its length has no end to take off"
    (sequence,) = rollout.sequences
    assert TOKENIZER.decode(sequence.tokens) == engine.asked[1] + "b<|tool|>"


def test_without_a_template_the_history_goes_on_as_it_was_sampled() -> None:
    engine = Says("yes<eos>", "no<eos>")
    prompt = Prompt("p", render_prompt(TOKENIZER, [QUESTION], apply_chat_template=False), (QUESTION,))
    rollout = asyncio.run(
        run_episode(
            engine,
            Twice(),  # type: ignore[arg-type]
            prompt,
            tokenizer=TOKENIZER,
            sampling=Sampling(),
            group=0,
            index=0,
            max_turns=2,
            apply_chat_template=False,
        )
    )
    assert engine.asked == ["q", "qyes<eos>more"]
    assert len(rollout.sequences) == 1 and rollout.text == "no"
