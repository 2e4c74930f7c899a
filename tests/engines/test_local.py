"""The engine against sampling one token at a time from plain forward passes, and its life among tasks and loops."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from novarl.core.errors import NovaError
from novarl.core.seeds import derive
from novarl.core.types import Completion, Sampling
from novarl.engines.local.engine import LocalEngine, sample_all
from novarl.engines.local.kv_cache import KVCache
from novarl.engines.local.prefixes import LONG
from novarl.engines.local.runner import ModelRunner
from novarl.engines.local.sampling import Parameters, choose
from novarl.models.load import Policy, load

from .conftest import echo, full_logits

Wanted = list[tuple[list[int], Sampling, str]]
LETTER_E = ord("e")


def make_engine(policy: Policy, *, max_batch: int = 64, eos_ids: Sequence[int] = (), context: int = 256) -> LocalEngine:
    return LocalEngine(policy.model, policy.tokenizer, eos_ids=eos_ids, context=context, max_batch=max_batch)


def ragged(n: int, *, sampling: Sampling | None = None, seed: int = 0) -> Wanted:
    """Requests with prompts of 6 to 40 letters and 1 to 40 tokens to sample."""
    rng = random.Random(seed)
    base = sampling or Sampling()
    return [
        (echo(rng.randint(6, 40), rng=rng), replace(base, max_tokens=rng.randint(1, 40)), f"row {i}") for i in range(n)
    ]


@torch.no_grad()
def one_token_at_a_time(policy: Policy, prompt: list[int], sampling: Sampling, key: str, ends: set[int]) -> list[int]:
    """The completion by full forward passes: no cache, no batch, stop strings looked for in the whole text."""
    tokens = list(prompt)
    parameters = Parameters.of([derive(sampling.seed, key)], [sampling], "cpu")
    while len(tokens) < len(prompt) + sampling.max_tokens:
        logits = full_logits(policy.model, tokens)[-1:]
        tokens.append(int(choose(logits, parameters, torch.tensor([len(tokens)])).token))
        text = policy.tokenizer.decode(tokens[len(prompt) :])
        if tokens[-1] in ends | set(sampling.stop_tokens) or any(string in text for string in sampling.stop):
            break
    return tokens[len(prompt) :]


def test_completions_equal_sampling_one_token_at_a_time(policy: Policy) -> None:
    rng = random.Random(1)
    kinds = [Sampling(temperature=1.2), Sampling(temperature=0.0), Sampling(stop=("zy", "b")), Sampling(top_p=0.9)]
    wanted = [(p, replace(rng.choice(kinds), max_tokens=s.max_tokens), k) for p, s, k in ragged(24)]
    got = sample_all(make_engine(policy, eos_ids=[LETTER_E], max_batch=7), wanted)
    reasons = set()
    for (prompt, sampling, key), completion in zip(wanted, got, strict=True):
        assert list(completion.tokens) == one_token_at_a_time(policy, prompt, sampling, key, {LETTER_E})
        reasons.add(completion.finish_reason)
    assert reasons == {"stop", "length"}


def test_recorded_log_probs_are_the_models_at_the_sampled_tokens(policy: Policy) -> None:
    wanted = ragged(16) + ragged(8, sampling=Sampling(temperature=0.7, top_k=3, min_p=0.05), seed=1)
    completions = sample_all(make_engine(policy), wanted)
    errors, logps = [], []
    for (prompt, sampling, _), completion in zip(wanted, completions, strict=True):
        with torch.no_grad():
            logits = full_logits(policy.model, [*prompt, *completion.tokens])[len(prompt) - 1 : -1]
        full = (logits / sampling.temperature).log_softmax(-1)
        true = full.gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0] - torch.tensor(completion.kept_logmass)
        errors.append((torch.tensor(completion.logp) - true).abs())
        logps.append(true)
        assert all(mass == 0 for mass in completion.kept_logmass) != sampling.truncates
        assert len(completion.tokens) == len(completion.kept_logmass) == len(completion.versions)
    error = torch.cat(errors)
    assert torch.cat(logps).mean() > -0.5, "the model is not sharp, so this shows nothing"
    assert error.mean() <= 1e-5 and error.max() <= 1e-3


def test_bfloat16_layers_stay_near_the_same_layers_in_the_learner(policy: Policy) -> None:
    engine = LocalEngine(policy.model, policy.tokenizer, eos_ids=[], context=256, compute_dtype=torch.bfloat16)
    errors = []
    wanted = ragged(16)
    for (prompt, _, _), completion in zip(wanted, sample_all(engine, wanted), strict=True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            ids = torch.tensor([[*prompt, *completion.tokens]])
            hidden = policy.model(ids, position_ids=torch.arange(ids.shape[1])[None]).last_hidden_state
        logits = (hidden[0].float() @ policy.model.lm_head.weight.T)[len(prompt) - 1 : -1]
        true = logits.detach().log_softmax(-1).gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0]
        errors.append((torch.tensor(completion.logp) - true).abs())
    error = torch.cat(errors)
    assert 0 < error.mean() <= 0.03 and error.quantile(0.99) <= 0.2


def test_each_way_to_end_is_told(policy: Policy) -> None:
    prompt = list(b"abcdebcdefcdefg")  # goes on defghefghi...
    greedy = Sampling(temperature=0.0, max_tokens=12)
    assert policy.tokenizer.decode(one_token_at_a_time(policy, prompt, greedy, "k", set())) == "defghefghifg"

    def sample(**changes) -> tuple[str, str]:
        eos_ids = changes.pop("eos_ids", ())
        engine = make_engine(policy, eos_ids=eos_ids, context=changes.pop("context", 256))
        (completion,) = sample_all(engine, [(prompt, replace(greedy, **changes), "k")])
        return policy.tokenizer.decode(completion.tokens), completion.finish_reason

    assert sample() == ("defghefghifg", "length")
    assert sample(max_tokens=1) == ("d", "length")
    assert sample(eos_ids=[ord("z"), ord("h")]) == ("defgh", "stop")
    assert sample(stop_tokens=(ord("g"), ord("i"))) == ("defg", "stop")
    assert sample(stop=("hef", "never")) == ("defghef", "stop")
    assert sample(stop=("gh", "h")) == ("defgh", "stop")
    assert sample(max_tokens=5, eos_ids=[ord("h")]) == ("defgh", "stop")
    assert sample(context=len(prompt) + 3) == ("def", "length")


def test_a_stop_string_may_begin_in_what_is_answered_already(policy: Policy) -> None:
    """A completion cut in two stops where it stopped whole; what was asked is no part of it."""
    prompt = list(b"abcdebcdefcdefg")  # goes on defghefghi...
    greedy = Sampling(temperature=0.0, max_tokens=12, stop=("fghef", "gd"))

    def goes_on(answer: bytes, answered: int) -> str:
        wanted = [([*prompt, *answer], replace(greedy, answered=answered), "k")]
        (completion,) = sample_all(make_engine(policy), wanted)
        return policy.tokenizer.decode(completion.tokens)

    assert goes_on(b"", 0) == "defghef"
    assert [goes_on(b"defghef"[:cut], cut) for cut in range(1, 7)] == ["defghef"[cut:] for cut in range(1, 7)]
    assert goes_on(b"defg", 0)[:4] == "hefg", "unless it is told, an engine takes all for the prompt"
    assert goes_on(b"", 1) == "d", "the prompt's last g, if it were of the answer"


def test_what_cannot_be_served_is_refused_and_harms_nobody_else(policy: Policy) -> None:
    async def check() -> None:
        engine = make_engine(policy, context=20)
        good = asyncio.create_task(engine.sample(list(b"abcdeabcde"), Sampling(max_tokens=3), key="k"))
        with pytest.raises(NovaError, match="20 tokens, which fills the model's context of 20"):
            await engine.sample([97] * 20, Sampling(), key="k")
        assert len((await good).tokens) == 3

    asyncio.run(check())


def test_a_group_shares_one_prefill_also_where_the_batch_is_full(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, reproducible: None
) -> None:
    engine = make_engine(policy, max_batch=4)
    prompts: list[tuple[int, ...]] = []
    prefill = engine._runner.prefill
    monkeypatch.setattr(engine._runner, "prefill", lambda new, known: (prompts.extend(new), prefill(new, known))[1])
    one, other = list(b"abcdebcdef"), list(b"qrstuv")
    wanted = [(one if i % 2 else other, Sampling(max_tokens=5 + i % 3, temperature=1.5), f"k{i}") for i in range(20)]
    completions = sample_all(engine, wanted)
    assert sorted(prompts) == sorted([tuple(one), tuple(other)])
    assert len({c.tokens for c in completions}) > 10, "samples of a group must differ"
    assert completions == [sample_all(engine, [request])[0] for request in wanted]


def test_an_engine_serves_one_event_loop_after_another(policy: Policy) -> None:
    engine = make_engine(policy)
    wanted = ragged(3)
    assert sample_all(engine, wanted) == sample_all(engine, wanted)
    loop = asyncio.new_event_loop()  # a loop that ends without cancelling its tasks
    left = loop.create_task(engine.sample(*wanted[2][:2], key="k"))
    loop.run_until_complete(asyncio.sleep(0))
    loop.run_until_complete(asyncio.sleep(0))
    assert engine._driver is not None
    left._log_destroy_pending = engine._driver._log_destroy_pending = False
    loop.close()
    assert len(sample_all(engine, wanted)) == 3


def test_between_steps_other_tasks_run_and_new_requests_join(policy: Policy) -> None:
    engine = make_engine(policy)
    prompt = list(b"abcdebcdef")

    async def check() -> None:
        long = asyncio.create_task(engine.sample(prompt, Sampling(max_tokens=100), key="long"))
        turns = 0
        while turns < 20:
            await asyncio.sleep(0)
            turns += 1
        assert not long.done()
        late = await engine.sample(prompt, Sampling(max_tokens=2), key="late")
        assert len(late.tokens) == 2 and not long.done()
        assert len((await long).tokens) == 100

    asyncio.run(check())


def test_an_exception_reaches_every_request_and_the_engine_goes_on(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(policy, max_batch=4)
    wanted = ragged(9, sampling=Sampling(temperature=1.1))

    async def all_results() -> list[Completion | BaseException]:
        return await asyncio.gather(*(engine.sample(p, s, key=k) for p, s, k in wanted), return_exceptions=True)

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "decode", lambda *_, **__: torch.full((4, 320), torch.nan))
        failed = [result for result in asyncio.run(all_results()) if isinstance(result, BaseException)]
        assert len(failed) >= 8 and all("logits are not finite" in str(error) for error in failed)
        patch.setattr(engine._runner, "prefill", lambda *_: 1 / 0)
        assert all(isinstance(result, ZeroDivisionError) for result in asyncio.run(all_results()))
    assert all(isinstance(result, Completion) for result in asyncio.run(all_results()))


def test_a_cancelled_request_leaves_its_row_to_others(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, reproducible: None
) -> None:
    engine = make_engine(policy, max_batch=2)
    steps: list[int] = []
    decode = engine._runner.decode
    monkeypatch.setattr(engine._runner, "decode", lambda *a, **k: (steps.append(1), decode(*a, **k))[1])
    alone = sample_all(engine, [(list(b"abcdefgh"), Sampling(max_tokens=30), "stays")])

    async def check() -> None:
        gone = [asyncio.create_task(engine.sample([97] * 9, Sampling(max_tokens=200), key=f"g{i}")) for i in range(3)]
        stays = asyncio.create_task(engine.sample(list(b"abcdefgh"), Sampling(max_tokens=30), key="stays"))
        for _ in range(10):
            await asyncio.sleep(0)
        for task in gone:
            task.cancel()
        assert [await stays] == alone
        assert all(isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*gone, return_exceptions=True))
        assert engine._driver is None and not engine._outstanding

    steps.clear()
    asyncio.run(check())
    assert len(steps) < 60, "the rows of cancelled requests went on to their 200 tokens"


def test_closing_cancels_those_who_wait_and_refuses_more(policy: Policy) -> None:
    engine = make_engine(policy, max_batch=1)

    async def check() -> None:
        tasks = [asyncio.create_task(engine.sample([97] * 9, Sampling(max_tokens=200), key=f"k{i}")) for i in range(3)]
        for _ in range(5):
            await asyncio.sleep(0)
        engine.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        with pytest.raises(RuntimeError, match="closed"):
            await engine.sample([97], Sampling(), key="k")
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(check())
    engine.close()


def test_multi_turn_requests_under_one_key_meet_new_noise_each_turn(policy: Policy) -> None:
    engine = make_engine(policy)
    wide = Sampling(temperature=50.0, max_tokens=8)
    first, again, longer = (
        sample_all(engine, [(prompt, wide, "k")])[0].tokens for prompt in ([97] * 9, [98] * 9, [97] * 10)
    )
    assert first == again, "at so high a temperature the noise decides, and it hangs on key and position alone"
    assert longer[:7] == first[1:] and longer != first


def test_published_weights_are_sampled_from_and_versions_are_recorded(policy: Policy) -> None:
    own = load("tiny", seed=7)
    engine = make_engine(own)
    wanted = ragged(4)
    before = sample_all(engine, wanted)
    engine.publish(policy.model.named_parameters(), 3)
    after = sample_all(engine, wanted)
    learner = sample_all(make_engine(policy), wanted)
    assert [c.tokens for c in after] == [c.tokens for c in learner] != [c.tokens for c in before]
    assert {v for c in before for v in c.versions} == {0} and {v for c in after for v in c.versions} == {3}

    async def publish_in_flight() -> Completion:
        task = asyncio.create_task(engine.sample([97] * 9, Sampling(max_tokens=20), key="k"))
        for _ in range(6):
            await asyncio.sleep(0)
        engine.publish(None, 4)
        return await task

    versions = asyncio.run(publish_in_flight()).versions
    assert set(versions) == {3, 4} and list(versions) == sorted(versions)


def test_a_long_prompt_that_others_still_continue_is_run_anew_by_new_weights(policy: Policy) -> None:
    own = load("tiny", seed=7)
    engine, fresh = make_engine(own), make_engine(policy)
    prompt = list(b"abcdefgh" * (LONG // 8 + 1))
    greedy = Sampling(temperature=0.0, max_tokens=8)

    async def overlap() -> Completion:
        first = asyncio.create_task(engine.sample(prompt, replace(greedy, max_tokens=40), key="first"))
        for _ in range(6):
            await asyncio.sleep(0)
        assert not first.done()
        engine.publish(policy.model.named_parameters(), 1)
        second = await engine.sample(prompt, greedy, key="second")
        assert not first.done(), "or nobody held the old keys any more"
        await first
        return second

    found, (expected,) = asyncio.run(overlap()), sample_all(fresh, [(prompt, greedy, "second")])
    assert (found.tokens, found.logp) == (expected.tokens, expected.logp)


def test_an_engine_that_failed_before_its_first_step_serves_the_next_request(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, wanted = make_engine(policy), ragged(2)
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "refresh", raising(ZeroDivisionError()))
        with pytest.raises(ZeroDivisionError):
            sample_all(engine, wanted)
    assert sample_all(engine, wanted) == sample_all(make_engine(policy), wanted)


def raising(error: Exception) -> Any:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_a_group_that_arrives_over_two_versions_gets_a_prefill_of_each(policy: Policy) -> None:
    own = load("tiny", seed=7)
    engine = make_engine(own, max_batch=1)
    prompt, greedy = list(b"abcdebcdef"), Sampling(temperature=0.0, max_tokens=5)

    async def check() -> list[Completion]:
        tasks = [asyncio.create_task(engine.sample(prompt, greedy, key=f"k{i}")) for i in range(3)]
        await tasks[0]
        engine.publish(policy.model.named_parameters(), 1)
        return [await task for task in tasks]

    first, _, last = asyncio.run(check())
    assert set(first.versions) == {0} and set(last.versions) == {1}
    assert last == sample_all(engine, [(prompt, greedy, "k2")])[0] and last.tokens != first.tokens


def test_weights_that_do_not_fit_are_refused_before_any_is_copied() -> None:
    own = load("tiny", seed=7, tied=False)
    engine = make_engine(own)
    good = {name: torch.zeros_like(parameter) for name, parameter in own.model.named_parameters()}
    bad = {
        "lack lm_head.weight": {name: tensor for name, tensor in good.items() if name != "lm_head.weight"},
        "unknown head.bias": {**good, "head.bias": torch.zeros(1)},
        r"lm_head.weight: .*\[2, 2\], not \[320, 128\]": {**good, "lm_head.weight": torch.zeros(2, 2)},
    }
    for words, weights in bad.items():
        with pytest.raises(NovaError, match=words):
            engine.publish(weights.items(), 1)
    assert engine.version == 0 and all(parameter.abs().sum() > 0 for parameter in own.model.parameters())
    engine.publish(good.items(), 1)
    assert not any(parameter.abs().sum() > 0 for parameter in own.model.parameters())


def test_dropout_is_off_while_sampling_and_every_mode_is_put_back(policy: Policy) -> None:
    class Dropping(nn.Module):
        """The trained model behind dropout, some of it in training mode and some not."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.dropout = policy.model, nn.Dropout(0.5)
            self.grad_enabled: set[bool] = set()

        @property
        def base_model(self) -> nn.Module:
            return self

        def get_output_embeddings(self) -> nn.Module:
            return self.inner.lm_head

        def forward(self, input_ids, **kwargs):
            self.grad_enabled.add(torch.is_grad_enabled())
            output = self.inner(input_ids, **kwargs)
            return output._replace(last_hidden_state=self.dropout(output.last_hidden_state))

    model, still = Dropping().train(), Dropping().eval()
    model.inner.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    engine = LocalEngine(model, policy.tokenizer, eos_ids=[], context=256)
    wanted = ragged(3)
    without = LocalEngine(still, policy.tokenizer, eos_ids=[], context=256)
    assert sample_all(engine, wanted) == sample_all(without, wanted)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert model.grad_enabled == {False} and torch.is_grad_enabled()


def test_logits_that_are_not_finite_are_an_error_not_a_token() -> None:
    own = load("tiny", seed=7)
    engine = make_engine(own)
    with torch.no_grad():
        own.model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(NovaError, match="not finite"):
        sample_all(engine, [([97], Sampling(), "k")])


@pytest.mark.parametrize("error", [OSError(errno.ENOMEM, "Cannot allocate memory"), MemoryError()])
def test_memory_that_runs_out_is_one_clear_error_and_no_end(
    policy: Policy, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(policy)

    def refuse(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "_zeros", refuse)
        with pytest.raises(NovaError, match=r"sampling: out of memory .*lower rollout.max_batch"):
            sample_all(engine, ragged(3))
    assert len(sample_all(engine, ragged(3))) == 3
