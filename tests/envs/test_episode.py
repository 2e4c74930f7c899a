"""Episodes token by token: masks, the prefix check, keys, limits and failures."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from novarl.core.types import EnvStep, Message, Prompt, Rollout, Sampling
from novarl.data.render import render_prompt
from novarl.envs.episode import UNSAMPLED, run_episode
from novarl.envs.single_turn import SingleTurn


class Talker:
    """An environment that says its lines, one a turn; a line may be an exception, an EnvStep, or None to end."""

    def __init__(self, *lines: Any, before: Sequence[Message] = ()) -> None:
        self.lines, self.before, self.seen = list(lines), tuple(before), []

    async def reset(self, prompt: Prompt) -> tuple[Message, ...]:
        if self.lines and isinstance(self.lines[0], ArithmeticError):
            raise self.lines[0]
        return (*self.before, *prompt.messages)

    async def step(self, messages: Sequence[Message]) -> EnvStep:
        self.seen.append([message["content"] for message in messages])
        line = self.lines.pop(0)
        if isinstance(line, Exception):
            raise line
        if isinstance(line, EnvStep):
            return line
        return EnvStep() if line is None else EnvStep(({"role": "tool", "content": line},), done=False)


def run(engine: Any, env: Any, prompt: Prompt, **options: Any) -> Rollout:
    settings = {"sampling": Sampling(max_tokens=9), "group": 4, "index": 2, "tokenizer": engine.tokenizer}
    return asyncio.run(run_episode(engine, env, prompt, **(settings | options)))


def shown(rollout: Rollout, tokenizer: Any) -> list[str]:
    """Each sequence as text, what the policy chose in capitals."""
    texts = []
    for sequence in rollout.sequences:
        pairs = zip(sequence.tokens, sequence.mask, strict=True)
        texts.append(
            "".join(";" if token == 0 else (chr(token).upper() if own else chr(token)) for token, own in pairs)
        )
    return texts


def test_a_single_turn_is_prompt_and_completion(tokenizer, scripted, ask) -> None:
    engine, prompt = scripted(tokenizer, "hello;"), ask(tokenizer)
    rollout = run(engine, SingleTurn(), prompt)
    (sequence,) = rollout.sequences
    assert shown(rollout, tokenizer) == ["u:hi;a:HELLO;"]
    assert sequence.tokens == prompt.tokens + tuple(tokenizer.encode("hello;"))
    assert sequence.mask == (False,) * 7 + (True,) * 6
    assert sequence.behavior_logp == (0.0,) * 7 + tuple(-1 - t / 100 for t in range(6))
    assert sequence.kept_logmass == (0.0,) * 7 + (-0.5,) * 6
    assert sequence.versions == (UNSAMPLED,) * 7 + (7,) * 6
    assert (rollout.text, rollout.status, rollout.finish_reason) == ("hello", "done", "stop")
    assert (rollout.group, rollout.index, rollout.role, rollout.prompt) == (4, 2, "train", prompt)
    assert [message["content"] for message in rollout.messages] == ["hi", "hello"]
    assert [asked[0] for asked in engine.asked] == ["rows.jsonl:3/2"]
    assert engine.asked[0][2] == Sampling(max_tokens=9)


def test_a_completion_cut_by_its_length_is_truncated(tokenizer, scripted, ask) -> None:
    rollout = run(scripted(tokenizer, "hello"), SingleTurn(), ask(tokenizer))
    assert (rollout.status, rollout.finish_reason, rollout.text) == ("truncated", "length", "hello")
    assert rollout.sequences[0].mask[-1] is True


def test_turns_extend_one_sequence_and_tools_are_masked_out(tokenizer, scripted, ask) -> None:
    engine, env = scripted(tokenizer, "look;", "done;"), Talker("found", None)
    rollout = run(engine, env, ask(tokenizer), max_turns=5)
    assert shown(rollout, tokenizer) == ["u:hi;a:LOOK;t:found;a:DONE;"]
    (sequence,) = rollout.sequences
    assert [v for v, own in zip(sequence.versions, sequence.mask, strict=True) if own] == [7] * 5 + [8] * 5
    assert all(logp == 0.0 for logp, own in zip(sequence.behavior_logp, sequence.mask, strict=True) if not own)
    assert [(key, text) for key, text, _ in engine.asked] == [
        ("rows.jsonl:3/2", "u:hi;a:"),
        ("rows.jsonl:3/2/1", "u:hi;a:look;t:found;a:"),
    ]
    assert env.seen == [["hi", "look"], ["hi", "look", "found", "done"]]
    assert (rollout.status, rollout.text, rollout.info["turns"]) == ("done", "done", 2)
    assert [message["role"] for message in rollout.messages] == ["user", "assistant", "tool", "assistant"]


def test_a_turn_that_a_stop_string_ended_is_closed_by_the_template(tokenizer, scripted, ask) -> None:
    """Sampled without an end token: the template's end token is given, so it is not trained on."""
    engine = scripted(tokenizer, "look", "done;")
    engine_sample = engine.sample

    async def stopped(tokens: Sequence[int], sampling: Sampling, *, key: str) -> Any:
        from dataclasses import replace

        return replace(await engine_sample(tokens, sampling, key=key), finish_reason="stop")

    engine.sample = stopped
    rollout = run(engine, Talker("found", None), ask(tokenizer), max_turns=2)
    assert shown(rollout, tokenizer) == ["u:hi;a:LOOK;t:found;a:DONE;"]
    assert rollout.sequences[0].mask[11] is False and rollout.sequences[0].tokens[11] == 0


def test_a_rewritten_context_starts_a_new_sequence(forgetful, scripted, ask) -> None:
    engine = scripted(forgetful, "[hm]look;", "done;")
    rollout = run(engine, Talker("found", None), ask(forgetful), max_turns=2)
    assert shown(rollout, forgetful) == ["u:hi;a:[HM]LOOK;", "u:hi;a:look;t:found;a:DONE;"]
    assert engine.asked[1][1] == "u:hi;a:look;t:found;a:", "the policy sees the rewritten context"
    assert rollout.sequences[1].mask.count(True) == 5


def test_sampled_text_is_never_tokenised_again(tokenizer, scripted, ask) -> None:
    """Capitals decode to small letters: another tokenisation of what was said. The sampled tokens stay as they are."""
    rollout = run(scripted(tokenizer, "LOOK;", "done;"), Talker("found", None), ask(tokenizer), max_turns=2)
    first, second = rollout.sequences
    assert first.tokens[-5:] == tuple(tokenizer.encode("LOOK;")) and first.mask[-5:] == (True,) * 5
    assert second.tokens[: len(first.tokens)] != first.tokens
    assert second.mask.count(True) == 5, "the re-tokenised turn is read, not learnt"


def test_the_turn_limit(tokenizer, scripted, ask) -> None:
    env = Talker("more", "more")
    rollout = run(scripted(tokenizer, "one;", "two;", "never;"), env, ask(tokenizer), max_turns=2)
    assert (rollout.status, rollout.finish_reason, rollout.text) == ("truncated", "turns", "two")
    assert rollout.messages[-1] == {"role": "assistant", "content": "two"}, "rewards find the answer at the end"


def test_the_context_limit(tokenizer, scripted, ask) -> None:
    rollout = run(scripted(tokenizer, "one;", "never;"), Talker("long" * 9), ask(tokenizer), max_turns=5, context=40)
    assert (rollout.status, rollout.finish_reason, rollout.text) == ("truncated", "context", "one")
    assert shown(rollout, tokenizer) == ["u:hi;a:ONE;"], "nothing longer than the context is learnt from"
    assert rollout.messages[-1] == {"role": "assistant", "content": "one"}, "rewards find the answer at the end"


def test_a_cut_turn_ends_the_conversation(tokenizer, scripted, ask) -> None:
    env = Talker(EnvStep(({"role": "tool", "content": "more"},), reward=0.25, done=False))
    rollout = run(scripted(tokenizer, "cut"), env, ask(tokenizer), max_turns=5)
    assert (rollout.status, rollout.finish_reason) == ("truncated", "length")
    assert rollout.info["env_reward"] == 0.25, "the environment may still reward it"


def test_rewards_and_notes_of_the_environment_are_collected(tokenizer, scripted, ask) -> None:
    more = ({"role": "tool", "content": "x"},)
    env = Talker(EnvStep(more, 0.5, False, {"a": 1}), EnvStep((), 2.0, True, {"b": 2}))
    rollout = run(scripted(tokenizer, "one;", "two;"), env, ask(tokenizer), max_turns=3)
    assert rollout.info == {"a": 1, "b": 2, "env_reward": 2.5, "turns": 2}
    assert "env_reward" not in run(scripted(tokenizer, "one;"), SingleTurn(), ask(tokenizer)).info


def test_what_the_environment_puts_before_the_question_is_rendered(tokenizer, scripted, ask) -> None:
    engine = scripted(tokenizer, "ok;")
    rollout = run(engine, Talker(None, before=[{"role": "system", "content": "tools"}]), ask(tokenizer))
    assert shown(rollout, tokenizer) == ["s:tools;u:hi;a:OK;"]


def test_the_prompt_is_used_as_it_was_rendered(tokenizer, scripted, ask) -> None:
    """Also where it was cut to fit: the tokens of the row are the tokens that are sampled from."""
    from dataclasses import replace

    prompt = replace(ask(tokenizer), tokens=ask(tokenizer).tokens[-3:])
    assert shown(run(scripted(tokenizer, "ok;"), SingleTurn(), prompt), tokenizer) == [";a:OK;"]


def test_without_a_chat_template_contents_are_joined(tokenizer, scripted) -> None:
    messages = ({"role": "user", "content": "2+2="},)
    prompt = Prompt("p", render_prompt(tokenizer, messages, apply_chat_template=False), messages)
    engine = scripted(tokenizer, "4", "6;")
    rollout = run(engine, SingleTurn(), prompt, apply_chat_template=False)
    assert shown(rollout, tokenizer) == ["2+2=4"]


@pytest.mark.parametrize("when", ["reset", "step", "second step", "message"])
def test_an_environment_that_raises_fails_its_episode_alone(tokenizer, scripted, ask, when: str) -> None:
    lines: dict[str, list[Any]] = {
        "reset": [ZeroDivisionError("no start")],
        "step": [KeyError("lost")],
        "second step": ["found", KeyError("lost")],
        "message": [EnvStep(({"role": "tool"},), done=False)],
    }
    rollout = run(scripted(tokenizer, "one;", "two;"), Talker(*lines[when]), ask(tokenizer), max_turns=3)
    assert (rollout.status, rollout.finish_reason) == ("failed", "error")
    assert rollout.info["error"].startswith("the environment raised ") and "Traceback" in rollout.info["error"]
    assert len(rollout.sequences) == (0 if when == "reset" else 1)


def test_an_engine_that_raises_is_our_error(tokenizer, scripted, ask) -> None:
    with pytest.raises(IndexError):
        run(scripted(tokenizer), SingleTurn(), ask(tokenizer))


@pytest.mark.parametrize("rewritten", [False, True])
def test_supports_stay_beside_their_tokens(rewritten: bool, tokenizer, forgetful, scripted, ask) -> None:
    """Over turns, and where the context is rewritten; what the policy did not choose has none."""
    letters = forgetful if rewritten else tokenizer
    engine = scripted(letters, "[hm]look;", "done;")
    engine_sample = engine.sample

    async def cut(tokens: Sequence[int], sampling: Sampling, *, key: str) -> Any:
        completion = await engine_sample(tokens, sampling, key=key)
        return replace(completion, support=tuple(token.to_bytes(4, "little") for token in completion.tokens))

    engine.sample = cut
    rollout = run(engine, Talker("found", None), ask(letters), max_turns=2)
    assert len(rollout.sequences) == 1 + rewritten
    for sequence in rollout.sequences:
        own = zip(sequence.tokens, sequence.mask, strict=True)
        assert sequence.support == tuple(token.to_bytes(4, "little") if chosen else b"" for token, chosen in own)


def test_without_truncation_a_sequence_has_no_supports(tokenizer, scripted, ask) -> None:
    assert run(scripted(tokenizer, "hello;"), SingleTurn(), ask(tokenizer)).sequences[0].support is None
