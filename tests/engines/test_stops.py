"""A completion stops exactly at the token with which its text first holds a stop string."""

from __future__ import annotations

import random
from collections.abc import Sequence

from novarl.engines.stops import StopRule
from novarl.models.byte_tokenizer import ByteTokenizer


def stop_index(rule: StopRule, tokens: Sequence[int]) -> int | None:
    return next((index for index, token in enumerate(tokens) if rule.feed(token)), None)


def reference(tokens: Sequence[int], stop_tokens: set[int], strings: Sequence[str], decode) -> int | None:
    for index in range(len(tokens)):
        text = decode(tokens[: index + 1])
        if tokens[index] in stop_tokens or any(string in text for string in strings):
            return index
    return None


class Pieces:
    """A tokenizer of pieces, one of which brings a space unless it opens the text, as sentencepiece's do."""

    pieces = ("a", "b", "ab", "ba", "", "▁a", "▁b", "abab")

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.pieces[token] for token in tokens).replace("▁", " ").removeprefix(" ")


def test_strings_are_found_wherever_tokens_cut_them(tokenizer: ByteTokenizer) -> None:
    rng = random.Random(0)
    text = "the końec 🎉 is néar"
    for strings in (["🎉"], ["ń", "zz"], ["r"], [" is "], ["é", "końec"], ["e"], ["absent"]):
        tokens = tokenizer.encode(text)
        expected = reference(tokens, set(), strings, tokenizer.decode)
        assert stop_index(StopRule((), strings, tokenizer.decode), tokens) == expected
    pieces = Pieces()
    found = 0
    for _ in range(500):
        tokens = [rng.randrange(len(pieces.pieces)) for _ in range(30)]
        strings = ["".join(rng.choice("ab ") for _ in range(rng.randint(1, 6))) for _ in range(2)]
        stop_tokens = {4} if rng.random() < 0.2 else set()
        expected = reference(tokens, stop_tokens, strings, pieces.decode)
        found += expected is not None
        assert stop_index(StopRule(stop_tokens, strings, pieces.decode), tokens) == expected, (tokens, strings)
    assert 100 < found < 500


def test_only_the_unsettled_end_is_decoded_again(tokenizer: ByteTokenizer) -> None:
    decoded: list[int] = []

    def decode(tokens: Sequence[int]) -> str:
        decoded.append(len(tokens))
        return tokenizer.decode(tokens)

    assert stop_index(StopRule((), ["never"], decode), tokenizer.encode("abc" * 100 + "🎉" * 10)) is None
    assert max(decoded) <= 8
