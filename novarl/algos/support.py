"""The support of truncated sampling (top-k, top-p, min-p) in a compact form.

`Support` concatenates the supports of rows: an int32 word for each block of 16 token ids of which at least one is
possible. Its upper half is the block, its lower half a bit mask:

    word = (id // 16) << 16 | sum of 1 << (id % 16) over the possible ids of the block

A row takes at most 4 bytes per possible token and at most V/4 bytes: 37.5 kB for a vocabulary of 150,000. A row without
words has full support, so untruncated tokens cost nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

WIDTH = 16
"""Token ids per word."""

LARGEST_VOCABULARY = WIDTH << 16
"""The largest supported vocabulary: 1,048,576."""


class Support(NamedTuple):
    """words [W] int32, and the row boundaries cu_words [N + 1] int64, on the same device."""

    words: Tensor
    cu_words: Tensor


def pack_support(possible: Tensor) -> Support:
    """Pack possible [N, V] bool. A row in which everything is possible gets no words.

    Raises ValueError if the vocabulary has more than `LARGEST_VOCABULARY` ids, or a row has no possible token.
    """
    count, vocabulary = possible.shape
    if vocabulary > LARGEST_VOCABULARY:
        raise ValueError(f"supports can be recorded for at most {LARGEST_VOCABULARY} token ids, not {vocabulary}")
    if not bool(possible.any(-1).all()):
        raise ValueError("a row has no possible token")
    row, token = (possible & ~possible.all(-1, keepdim=True)).nonzero(as_tuple=True)
    block, member = torch.unique_consecutive(row * LARGEST_VOCABULARY + token // WIDTH, return_inverse=True)
    bits = torch.zeros_like(block).index_add(0, member, 1 << token % WIDTH)
    words = (block % LARGEST_VOCABULARY) << 16 | bits
    lengths = torch.bincount(block // LARGEST_VOCABULARY, minlength=count)
    return Support(torch.where(words >= 1 << 31, words - (1 << 32), words).int(), _cumulative(lengths))


def support_of(support: Support, rows: Tensor) -> Support:
    """The supports of selected rows [M] int64, in order."""
    lengths = support.cu_words.diff()[rows]
    cu_words = _cumulative(lengths)
    shift = torch.repeat_interleave(support.cu_words[:-1][rows] - cu_words[:-1], lengths)
    return Support(support.words[torch.arange(len(shift), device=shift.device) + shift], cu_words)


def impossible(support: Support, first: int, last: int, vocabulary: int) -> Tensor:
    """The tokens outside the supports of rows first .. last - 1, [last - first, V] bool: all False for full support."""
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
