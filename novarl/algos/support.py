"""The tokens that truncated sampling (top-k, top-p, min-p) left possible, and their compact form.

Rows of tokens have their supports one after the other, as `Support`: an int32 word for each 16 neighbouring token ids
of which at least one is possible, its upper half saying which 16, its lower half which of them:

    word = (id // 16) << 16 | sum of 1 << (id % 16) over the possible ids of these 16

A row takes at most 4 bytes a possible token, and never more than V/4 bytes: 37.5 kB of a vocabulary of 150,000. A row
without words has its full support, so tokens that nothing was cut for cost nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

WIDTH = 16
"""Token ids in a word."""

LARGEST_VOCABULARY = WIDTH << 16
"""Ids that fit: 1,048,576."""


class Support(NamedTuple):
    """words [W] int32, and where each row's begin and end, cu_words [N + 1] int64; both on one device."""

    words: Tensor
    cu_words: Tensor


def pack_support(possible: Tensor) -> Support:
    """The supports of rows, from possible [N, V] bool. A row of which all is possible gets no words.

    ValueError if the vocabulary has more than `LARGEST_VOCABULARY` ids, or a row has no possible token.
    """
    count, vocabulary = possible.shape
    if vocabulary > LARGEST_VOCABULARY:
        raise ValueError(f"a support can be recorded of at most {LARGEST_VOCABULARY} token ids, not {vocabulary}")
    if not bool(possible.any(-1).all()):
        raise ValueError("a row has no possible token")
    row, token = (possible & ~possible.all(-1, keepdim=True)).nonzero(as_tuple=True)
    block, member = torch.unique_consecutive(row * LARGEST_VOCABULARY + token // WIDTH, return_inverse=True)
    bits = torch.zeros_like(block).index_add(0, member, 1 << token % WIDTH)
    words = (block % LARGEST_VOCABULARY) << 16 | bits
    lengths = torch.bincount(block // LARGEST_VOCABULARY, minlength=count)
    return Support(torch.where(words >= 1 << 31, words - (1 << 32), words).int(), _cumulative(lengths))


def support_of(support: Support, rows: Tensor) -> Support:
    """The supports of some rows [M] int64, in their order."""
    lengths = support.cu_words.diff()[rows]
    cu_words = _cumulative(lengths)
    shift = torch.repeat_interleave(support.cu_words[:-1][rows] - cu_words[:-1], lengths)
    return Support(support.words[torch.arange(len(shift), device=shift.device) + shift], cu_words)


def impossible(support: Support, first: int, last: int, vocabulary: int) -> Tensor:
    """Which tokens the rows first .. last - 1 could not have been, [last - first, V] bool: all False where a row has
    its full support."""
    bounds = support.cu_words[first : last + 1]
    lengths = bounds.diff()
    words = support.words[int(bounds[0]) : int(bounds[-1])].long()
    cut = (lengths > 0)[:, None].repeat(1, vocabulary)
    row = torch.repeat_interleave(torch.arange(last - first, device=words.device), lengths)
    word, bit = (words[:, None] >> torch.arange(WIDTH, device=words.device) & 1).nonzero(as_tuple=True)
    cut[row[word], (words[word] >> 16 & 0xFFFF) * WIDTH + bit] = False
    return cut


def _cumulative(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
