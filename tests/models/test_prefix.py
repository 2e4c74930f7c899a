"""Which beginnings are shared, by hand; and that nothing is lost on the way there and back."""

from __future__ import annotations

import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from novarl.kernels.attention import packed_attention
from novarl.kernels.packing import packing_of
from novarl.kernels.prefix import TOLL, Group, Rest, common_beginnings, find_groups, groups_of, unique_places

A, B = tuple(range(100, 120)), tuple(range(200, 230))
"""Two prompts of 20 and 30 tokens."""


def flat(rows: list[tuple[int, ...]]) -> tuple[Tensor, Tensor, list[int]]:
    """Tokens, positions and lengths of rows."""
    tokens = torch.tensor([token for row in rows for token in row])
    return tokens, torch.cat([torch.arange(len(row)) for row in rows]), [len(row) for row in rows]


def test_common_beginnings() -> None:
    assert common_beginnings(*flat([(1, 2, 3), (1, 2, 4, 5), (1, 2, 4, 5), (1,), (2, 3)])) == [2, 4, 1, 0]
    assert common_beginnings(*flat([(1, 2)])) == []


def test_equal_tokens_at_other_positions_are_not_shared() -> None:
    tokens, positions, lengths = flat([A, A])
    positions[20:] += 1
    assert common_beginnings(tokens, positions, lengths) == [0]


def test_groups_of_two_prompts() -> None:
    rows = [(*A, 1, 2), (*A, 3), (*A, 4, 5, 6), (*B, 1), (*B, 2, 3), (7, 8)]
    assert find_groups(*flat(rows)) == [
        Group(20, (Rest(0, 2), Rest(1, 1), Rest(2, 3))),
        Group(30, (Rest(0, 1), Rest(1, 2))),
        Group(2),
    ]


def test_a_neighbour_that_shares_little_is_left_out() -> None:
    """The first has ten tokens of the others': with it the group would share ten, without it ninety."""
    long = tuple(range(1, 91))
    rows = [(*long[:10], *range(200, 280)), *((*long, n) for n in range(4))]
    assert find_groups(*flat(rows)) == [Group(90), Group(90, tuple(Rest(n, 1) for n in range(4)))]


def test_short_groups_of_one_template_are_one() -> None:
    """Two prompts that begin with five equal tokens, with two answers each; a third has another beginning."""
    template = (9, 8, 7, 6, 5)
    rows = [(*template, *prompt, n) for prompt in (range(10, 22), range(30, 42)) for n in (1, 2)]
    joined, apart = find_groups(*flat([*rows, (9, 8, 7, *range(30))]))
    assert (joined.prefix, joined.tokens, joined.members) == (5, 5 + 2 * 14, 4)
    assert apart == Group(33)
    between = find_groups(*flat([*rows[:2], (*template, *range(100, 170)), *rows[2:]]))
    assert [group.members for group in between] == [2, 1, 2], "a long one takes no part"
    long = [(*row, *range(100, 160)) for row in rows]
    assert [group.prefix for group in find_groups(*flat(long))] == [17, 17], "of long ones attention would cost more"


def test_what_saves_too_little_is_not_shared() -> None:
    assert groups_of([TOLL], [50, 50]) == [range(1), range(1, 2)]
    assert groups_of([2 * TOLL], [50, 50]) == [range(1), range(1, 2)], "one prefix saved, two members to pay for"
    assert groups_of([2 * TOLL + 1], [50, 50]) == [range(2)]


def test_rests_that_begin_alike_are_neighbours_and_share() -> None:
    rows = [(*A, 5, 6, 7), (*A, 1), (*A, 5, 6, 7), (*A, 5, 2), (*A, 1, 4)]
    (group,) = find_groups(*flat(rows))
    assert group == Group(20, (Rest(1, 1), Rest(4, 2, 1), Rest(3, 2), Rest(0, 3, 1), Rest(2, 3, 3)))
    assert group.tokens == 20 + 6, "the answers' tree has six nodes"
    assert group.places(100) == [[120], [120, 121], [122, 123], [122, 124, 125], [122, 124, 125]]
    assert group.whole() == [False, True, True, False, True]


def test_equal_rests_at_other_positions_share_nothing() -> None:
    tokens, positions, lengths = flat([(*A, 1, 2), (*A, 1, 2)])
    positions[-2:] += 1
    assert find_groups(tokens, positions, lengths) == [Group(20, (Rest(0, 2), Rest(1, 2)))]


def test_equal_sequences_have_empty_rests() -> None:
    assert find_groups(*flat([A, A, A])) == [Group(20, tuple(Rest(n, 0) for n in range(3)))]


rows_of_prompts = st.lists(
    st.tuples(st.sampled_from([(), A, B, A[:12], (*A, *B)]), st.lists(st.integers(0, 3), max_size=9)), min_size=1
).map(lambda rows: [(*prompt, *answer) or (9,) for prompt, answer in rows])


@settings(deadline=None, max_examples=60)
@given(rows=rows_of_prompts)
def test_there_and_back(rows: list[tuple[int, ...]]) -> None:
    """Every token comes back, at its position, and attention over what is shared is that of each sequence alone."""
    tokens, positions, lengths = flat(rows)
    groups = find_groups(tokens, positions, lengths)
    kept, spread = unique_places(groups, tokens.device)
    assert torch.equal(tokens[kept][spread], tokens) and torch.equal(positions[kept][spread], positions)
    assert len(kept) == sum(group.tokens for group in groups) and len(spread) == len(tokens)
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(3, 300, 4, 8, generator=generator, dtype=torch.float64)
    vary = torch.randn(3, 64, 1, 8, generator=generator, dtype=torch.float64)

    def states(tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (t[tokens] + v[positions] for t, v in zip(table, vary, strict=True))
        return tuple(x.transpose(0, 1)[None] for x in (query, key[:, :2], value[:, :2]))  # type: ignore[return-value]

    shared = packed_attention(*states(tokens[kept], positions[kept]), packing_of(groups, tokens.device))
    apart = packed_attention(*states(tokens, positions), packing_of([Group(n) for n in lengths], tokens.device))
    torch.testing.assert_close(shared[:, :, spread], apart, rtol=1e-12, atol=1e-12)
