"""Golden numbers of the correction and of the effective sample size."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, strategies as st

from novarl.algos import off_policy
from novarl.algos.axes import CORRECTIONS, keywords
from novarl.algos.off_policy import effective_sample_size, staleness


def by_table(name: str) -> Callable[..., torch.Tensor]:
    """A correction with the bounds that the table gives it."""
    row = CORRECTIONS[name]
    return partial(getattr(off_policy, row.function), **keywords(row.reads, row.reads))


truncated_weight, masked_weight = by_table("token"), by_table("icepop")
sequence_truncated_weight, sequence_masked_weight = by_table("sequence"), by_table("sequence_mask")

EVERY = pytest.mark.parametrize(
    "weigh", [truncated_weight, masked_weight, sequence_truncated_weight, sequence_masked_weight]
)
BY_SEQUENCE = pytest.mark.parametrize("weigh", [sequence_truncated_weight, sequence_masked_weight])
ROWS = st.integers(1, 5).flatmap(
    lambda width: st.lists(
        st.lists(st.tuples(st.floats(-3, 0), st.floats(-3, 0), st.booleans()), min_size=width, max_size=width),
        min_size=1,
        max_size=4,
    )
)


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_weight_golden() -> None:
    """pi_old = 1/2, 1/2, 1/2 over mu = 1/4, 1/8, 1: 2, 4 cut to 3, 1/2; the last column is masked out."""
    old, behavior = column(1 / 2, 1 / 2, 1 / 2, 1 / 2).log(), column(1 / 4, 1 / 8, 1.0, 1 / 4).log()
    mask = torch.tensor([True, True, True, False])
    assert truncated_weight(old, behavior, mask, maximum=3.0).tolist() == pytest.approx([2.0, 3.0, 0.5, 0.0])


def test_masked_weight_golden() -> None:
    """Ratios 2, 4, 1/2, 5 and 0.4 within [0.5, 4]; the bounds belong to it. By default they are 0.5 and 5."""
    old, behavior = column(1 / 2, 1 / 2, 1 / 2, 1 / 2, 0.2).log(), column(1 / 4, 1 / 8, 1.0, 0.1, 0.5).log()
    mask = torch.tensor([True] * 5)
    found = masked_weight(old, behavior, mask, low=0.5, high=4.0).tolist()
    assert found == pytest.approx([2.0, 4.0, 0.5, 0.0, 0.0])
    ratio = column(0.49, 0.51, 4.99, 5.01)
    assert masked_weight(ratio.log(), column(0, 0, 0, 0), torch.tensor([True] * 4)).gt(0).tolist() == [0, 1, 1, 0]


def test_sequence_weights_golden() -> None:
    """Sequence 8 has ratios 2, 4 and a column outside the mask, 3 has 1/2: products 8, 1/2 and roots sqrt 8, 1/2."""
    ratio, mask = column(2.0, 1 / 2, 4.0, 99.0), torch.tensor([True, True, True, False])
    arguments = (ratio.log(), torch.zeros_like(ratio), mask)
    ids = torch.tensor([8, 3, 8, 8])

    def weight(weigh: Callable[..., torch.Tensor], **options: float) -> list[float]:
        return weigh(*arguments, sequence=ids, **options).tolist()

    root = 8**0.5
    assert weight(sequence_truncated_weight, maximum=9.0) == pytest.approx([8.0, 0.5, 8.0, 0.0])
    assert weight(sequence_truncated_weight) == pytest.approx([2.0, 0.5, 2.0, 0.0])
    assert weight(sequence_truncated_weight, maximum=9.0, geometric=True) == pytest.approx([root, 0.5, root, 0.0])
    assert weight(sequence_masked_weight, low=0.4, high=9.0) == pytest.approx([8.0, 0.5, 8.0, 0.0])
    assert weight(sequence_masked_weight, low=0.4) == pytest.approx([0.0, 0.5, 0.0, 0.0])
    assert weight(sequence_masked_weight, low=0.6, high=3.0, geometric=True) == pytest.approx([root, 0.0, root, 0.0])


@EVERY
def test_weight_is_data(weigh: Callable[..., torch.Tensor]) -> None:
    old = column(-1.0)[None].requires_grad_()
    assert not weigh(old, column(-1.5)[None], torch.tensor([[True]])).requires_grad


@EVERY
@pytest.mark.parametrize("junk", [-1e4, math.inf, -math.inf, math.nan])
def test_weight_outside_the_mask_is_zero(weigh: Callable[..., torch.Tensor], junk: float) -> None:
    old, behavior = column(-1.0, 0.0)[None], column(-1.0, junk)[None]
    for first, second in ((old, behavior), (behavior, old)):
        assert weigh(first, second, torch.tensor([[True, False]])).tolist() == [[1.0, 0.0]]


@EVERY
def test_a_token_that_mu_found_impossible_is_capped_or_left_out(weigh: Callable[..., torch.Tensor]) -> None:
    found = weigh(column(0.0)[None], column(-1e5)[None], torch.tensor([[True]])).item()
    assert found == (2.0 if weigh in (truncated_weight, sequence_truncated_weight) else 0.0)


@EVERY
@given(rows=ROWS)
def test_rows_and_packed_tokens_have_the_same_weights(
    weigh: Callable[..., torch.Tensor], rows: list[list[tuple[float, float, bool]]]
) -> None:
    values = torch.tensor(rows, dtype=torch.float64)
    columns = [values[..., 0], values[..., 1], values[..., 2].bool()]
    ids = torch.arange(len(rows))[:, None].expand_as(columns[0]).flatten() * -5
    options = {} if weigh in (truncated_weight, masked_weight) else {"sequence": ids}
    packed = weigh(*(each.flatten() for each in columns), **options)
    torch.testing.assert_close(packed.view_as(columns[0]), weigh(*columns), rtol=1e-12, atol=0)


@BY_SEQUENCE
@given(rows=ROWS)
def test_one_weight_for_a_sequence(
    weigh: Callable[..., torch.Tensor], rows: list[list[tuple[float, float, bool]]]
) -> None:
    """All its tokens share it; alone, a token has its own ratio, whether the root is taken or not."""
    values = torch.tensor(rows, dtype=torch.float64)
    old, behavior, mask = values[..., 0], values[..., 1], values[..., 2].bool()
    for row, inside in zip(weigh(old, behavior, mask), mask, strict=True):
        assert row[inside].unique().numel() <= 1 and row[~inside].eq(0).all()
    alone = {"sequence": torch.arange(mask.numel()).view_as(old)}
    token = truncated_weight if weigh is sequence_truncated_weight else masked_weight
    for geometric in (True, False):
        found = weigh(old, behavior, mask, **alone, geometric=geometric)
        torch.testing.assert_close(found, token(old, behavior, mask), rtol=1e-14, atol=0)


@BY_SEQUENCE
def test_packed_tokens_without_ids_are_refused(weigh: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="pass `sequence` ids"):
        weigh(column(-1.0), column(-1.0), torch.tensor([True]))


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_kept(weigh: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    old = torch.zeros(2, 3, dtype=dtype)
    assert weigh(old, old, torch.ones(2, 3, dtype=torch.bool)).dtype == dtype


def test_staleness_golden() -> None:
    """Versions 7 and 4 at version 7: 0 and 3 behind, so 1.5; the prompt's version does not count."""
    version = torch.tensor([-1, 7, 4, 99])
    assert staleness(version, 7, torch.tensor([False, True, True, False])).item() == 1.5
    assert staleness(version, 7, torch.zeros(4, dtype=torch.bool)).item() == 0.0


def test_effective_sample_size_golden() -> None:
    """(1 + 2 + 3)^2 / (3 (1 + 4 + 9)) = 36/42; all equal: 1; one of four: 1/4; none: 0."""
    everything = torch.tensor([True] * 4)
    assert effective_sample_size(column(1, 2, 9, 3), torch.tensor([True, True, False, True])).item() == pytest.approx(
        6 / 7
    )
    assert effective_sample_size(column(2, 2, 2, 2), everything).item() == 1.0
    assert effective_sample_size(column(0, 0, 5, 0), everything).item() == 0.25
    assert effective_sample_size(column(1, 1, 1, 1), ~everything).item() == 0.0
    assert effective_sample_size(column(0, 0, 0, 0), everything).item() == 0.0


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=9), st.floats(0.1, 10))
def test_effective_sample_size_lies_between_one_sample_and_all(weights: list[float], scale: float) -> None:
    weight, everything = column(*weights), torch.ones(len(weights), dtype=torch.bool)
    share = effective_sample_size(weight, everything).item()
    assert 1 / len(weights) - 1e-9 <= share <= 1 + 1e-9
    assert effective_sample_size(scale * weight, everything).item() == pytest.approx(share)
