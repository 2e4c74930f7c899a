"""Long prompts are kept once for all who continue them, and read together: the numbers stay those of one alone."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from novarl.core.processor import exact_products
from novarl.core.types import Completion, Sampling
from novarl.engines.local import decode
from novarl.engines.local.batch import Batch
from novarl.engines.local.cache_rows import settle
from novarl.engines.local.decode import LeanDecoder, _Attention
from novarl.engines.local.engine import LocalEngine, sample_all
from novarl.engines.local.kv_cache import SLAB, KVCache
from novarl.engines.local.prefixes import LONG, Prefixes
from novarl.engines.local.shared_prefix import SharedPrefixes, places_for, stands_alone
from novarl.models.load import Policy

from .conftest import echo

Wanted = list[tuple[list[int], Sampling, str]]


def requests() -> Wanted:
    """Groups of unlike sizes, of prompts from shorter than LONG to three slabs, some of which begin alike; completions
    of unlike lengths."""
    rng = random.Random(1)
    base = echo(300, rng=rng)
    prompts = [echo(20, rng=rng), echo(LONG - 1, rng=rng), base[:LONG], base[:150], base, echo(257, rng=rng)]
    wanted: Wanted = []
    for index, prompt in enumerate(prompts):
        for sample in range(1 + 2 * index):
            sampling = Sampling(max_tokens=rng.randint(1, 40), seed=sample, temperature=(1.0, 1.5)[sample % 2])
            wanted.append((prompt, sampling, f"{index}/{sample}"))
    rng.shuffle(wanted)
    return wanted


def engine(policy: Policy, max_batch: int = 64) -> LocalEngine:
    return LocalEngine(policy.model, policy.tokenizer, eos_ids=[0], context=512, max_batch=max_batch)


def alone(policy: Policy) -> list[Completion]:
    return [sample_all(engine(policy), [request])[0] for request in requests()]


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are shared whatever this machine's products do to the last bits."""
    monkeypatch.setattr(decode, "stands_alone", lambda *_: True)


def unshared(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> list[Completion]:
    """By a machine whose products do not allow it."""
    with monkeypatch.context() as patched:
        patched.setattr(decode, "stands_alone", lambda *_: False)
        return sample_all(engine(policy), requests())


@pytest.mark.parametrize("max_batch", [64, 9])
def test_who_shares_gets_the_bits_of_one_alone(policy: Policy, reproducible: None, max_batch: int) -> None:
    together = sample_all(engine(policy, max_batch), requests())
    assert together == alone(policy)
    assert len({completion.tokens for completion in together}) > 20, "unlike answers"


def test_sharing_changes_roundings_alone(policy: Policy, monkeypatch: pytest.MonkeyPatch, shared: None) -> None:
    apart, together = unshared(policy, monkeypatch), sample_all(engine(policy), requests())
    assert [one.tokens for one in apart] == [one.tokens for one in together]
    assert apart != together, "or nothing was shared"
    for one, other in zip(apart, together, strict=True):
        torch.testing.assert_close(torch.tensor(one.logp), torch.tensor(other.logp), rtol=0, atol=1e-4)


def test_a_prompt_is_kept_once_as_long_as_somebody_continues_it(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, shared: None
) -> None:
    held: list[tuple[list[int], int]] = []
    honest = Batch._decode_branches

    def look(self: Batch) -> Tensor:
        held.append(([len(prompt) for prompt, _ in self._prefixes._prompts], self._cache.capacity))
        return honest(self)

    monkeypatch.setattr(Batch, "_decode_branches", look)
    rng = random.Random(2)
    prompts = {length: echo(length, rng=rng) for length in (30, 130, 150, 400)}
    wanted = [
        (prompt, Sampling(max_tokens=40 if length == 150 else 20, seed=seed), f"{length}/{seed}")
        for length, prompt in prompts.items()
        for seed in range(6)
    ]
    sample_all(engine(policy), wanted)
    assert held[0][0] == [400, 150, 130], "in the order of slabs; the short one is not among them"
    assert held[-1][0] == [150], "the others have ended"
    assert all(slots <= SLAB for _, slots in held), "rows hold answers, not prompts of four slabs"


def no_lane_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that end leave their lane, and rows go on looking where theirs was."""
    monkeypatch.setattr(Prefixes, "keep", lambda self, lanes: lanes)


def keys_stay_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = KVCache.move

    def move(self: KVCache, to: list[int], origin: list[int], length: int) -> None:
        honest(self, to, origin, min(length, 60))

    monkeypatch.setattr(KVCache, "move", move)


def short_prompts_see_beyond_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = SharedPrefixes.__init__

    def begin(self: SharedPrefixes, cache: KVCache, lengths: list[int], *rest: Tensor, queries: int) -> None:
        longest = [-(-length // SLAB) * SLAB for length in lengths]
        honest(self, cache, longest, *rest, queries=queries)

    monkeypatch.setattr(SharedPrefixes, "__init__", begin)


def positions_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = SharedPrefixes.__init__

    def begin(self: SharedPrefixes, *given: object, **named: int) -> None:
        honest(self, *given, **named)  # type: ignore[arg-type]
        self.before = torch.zeros_like(self.before)

    monkeypatch.setattr(SharedPrefixes, "__init__", begin)


def rows_stand_in_each_others_places(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = SharedPrefixes.__init__

    def begin(
        self: SharedPrefixes,
        cache: KVCache,
        lengths: list[int],
        rows: Tensor,
        sharing: Tensor | None,
        places: Tensor,
        *rest: Tensor,
        queries: int,
    ) -> None:
        honest(self, cache, lengths, rows, sharing, places.roll(1), *rest, queries=queries)

    monkeypatch.setattr(SharedPrefixes, "__init__", begin)


@pytest.mark.parametrize(
    "fault",
    [
        no_lane_moves,
        keys_stay_where_they_were,
        short_prompts_see_beyond_their_end,
        positions_begin_again,
        rows_stand_in_each_others_places,
    ],
)
def test_faults_are_caught(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, shared: None, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    right = unshared(policy, monkeypatch)
    assert [one.tokens for one in sample_all(engine(policy), requests())] == [one.tokens for one in right]
    fault(monkeypatch)
    try:
        wrong = sample_all(engine(policy), requests())
    except IndexError:
        return
    assert [one.tokens for one in wrong] != [one.tokens for one in right]


@pytest.mark.parametrize("queries", [1, 2, 3, 4])
@pytest.mark.parametrize("all_share", [True, False])
@torch.no_grad()
def test_attention_is_that_of_rows_with_copies_of_their_own(queries: int, all_share: bool) -> None:
    """In float64, for lanes of unlike lengths and rows without prefix, prefixes that end within a slab or with it."""
    generator = torch.Generator().manual_seed(0)
    lengths, key_heads, size, capacity = [300, 256, 130, 128, 97], 2, 16, 4 * SLAB
    lanes = np.array([3, 0, -1, 1, 0, 4, 0, 2, -1, 1, 3, 0])
    if all_share:
        lanes = lanes.clip(min=0)
    own = torch.randint(1, 100, (len(lanes),), generator=generator)
    before = torch.tensor([lengths[lane] if lane >= 0 else 0 for lane in lanes.tolist()])
    prompts = KVCache(len(lengths), 300, dtype=torch.float64, slab=SLAB)
    rows, plain = (KVCache(len(lanes), capacity, dtype=torch.float64, slab=SLAB) for _ in range(2))

    def drawn(count: int, slots: int) -> tuple[Tensor, Tensor]:
        key, value = torch.randn(2, count, slots, key_heads, size, generator=generator, dtype=torch.float64)
        return key, value

    of_prompts, of_rows = drawn(len(lengths), 300), drawn(len(lanes), 100)
    every = torch.arange(capacity)
    for cache, parts in ((prompts, of_prompts), (rows, of_rows)):
        slots = parts[0].shape[1]
        cache.place(every[:slots].expand(len(parts[0]), -1), slots)
        cache.write(*parts, 0)
    joined = []
    for kind in range(2):
        whole = torch.zeros(len(lanes), capacity, key_heads, size, dtype=torch.float64)
        for row, (lane, start) in enumerate(zip(lanes.tolist(), before.tolist(), strict=True)):
            whole[row, :start] = of_prompts[kind][lane, :start]
            whole[row, start : start + 100] = of_rows[kind][row]
        joined.append(whole)
    plain.place(every.expand(len(lanes), -1), capacity)
    plain.write(joined[0], joined[1], 0)

    store = Prefixes.__new__(Prefixes)
    store._queries, store._cache, store._prompts = queries, prompts, [((0,) * length, 0) for length in lengths]
    shared = store.shared(lanes, len(lanes))
    assert shared is not None
    assert torch.equal(shared.before[:, 0], before)
    heads = key_heads * queries
    query = torch.randn(len(lanes), 1, heads, size, generator=generator, dtype=torch.float64)
    found, right = torch.empty(2, len(lanes), heads * size, dtype=torch.float64)
    at = (own - 1)[:, None]
    _Attention(at, rows, [(0, len(lanes), 112)], heads, key_heads, shared)(query, 0, found)
    _Attention(at + before[:, None], plain, [(0, len(lanes), capacity)], heads, key_heads)(query, 0, right)
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(right[0], right[10]), "rows of one lane differ"


def test_places_hold_a_multiple_of_four_queries() -> None:
    assert [places_for(1, queries) for queries in (1, 2, 3, 4, 6)] == [4, 2, 4, 1, 2]
    assert [places_for(5, queries) for queries in (1, 2, 3, 4, 6)] == [8, 6, 8, 5, 6]


def test_rows_settle_with_the_least_moves() -> None:
    """Those of the largest size first; two that come from one are a copy."""
    places, movers = settle(np.array([0, 1, 1, 3]), np.array([2, 1, 1, 2]))
    assert sorted(places.tolist()) == [0, 1, 2, 3] and set(movers.tolist()) == {1, 2, 3}
    assert places[0] == 0 and places[3] == 1, "the two of size 2"


def test_products_of_one_kernel_allow_it(policy: Policy, reproducible: None) -> None:
    """Those of MKL's STRICT modes, which Intel's processors run; on others it is tried out and may turn out as it
    does."""
    config = policy.model.config
    allowed = stands_alone(config.head_dim, torch.float32)
    assert allowed or not exact_products().endswith("STRICT")
    queries = config.num_attention_heads // config.num_key_value_heads
    assert LeanDecoder(policy.model, torch.float32).shared_queries == (queries if allowed else None)


def test_products_that_follow_their_size_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = torch.bmm

    def bmm(left: Tensor, right: Tensor) -> Tensor:
        found = honest(left, right)
        return found if left.shape[1] < 32 else found * (1 + 1e-7)

    monkeypatch.setattr(torch, "bmm", bmm)
    assert not stands_alone.__wrapped__(32, torch.float32), "without what was found before"
