"""A completion stops exactly at the token with which its text first holds a stop string."""

from __future__ import annotations

import random
from collections.abc import Sequence

from novarl.engines.local.stops import StopRule
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


def test_a_stop_string_may_begin_in_what_came_before() -> None:
    """Wherever an answer is cut, its rest stops where the whole does."""
    rng, pieces = random.Random(1), Pieces()
    within = 0
    for _ in range(300):
        tokens = [rng.randrange(len(pieces.pieces)) for _ in range(30)]
        strings = ["".join(rng.choice("ab ") for _ in range(rng.randint(3, 7)))]
        whole = reference(tokens, set(), strings, pieces.decode)
        for cut in range(whole + 1 if whole is not None else len(tokens)):
            rest = stop_index(StopRule((), strings, pieces.decode, begun=tokens[:cut]), tokens[cut:])
            assert rest == (None if whole is None else whole - cut), (tokens, strings, cut)
            alone = stop_index(StopRule((), strings, pieces.decode), tokens[cut:])
            within += alone != rest
    assert within > 100, "strings that were cut"


def test_a_character_may_begin_in_what_came_before(tokenizer: ByteTokenizer) -> None:
    tokens = tokenizer.encode("a🎉b")
    for cut in range(len(tokens)):
        rest = stop_index(StopRule((), ["🎉b"], tokenizer.decode, begun=tokens[:cut]), tokens[cut:])
        assert rest == reference(tokens, set(), ["🎉b"], tokenizer.decode) - cut


def test_only_the_unsettled_end_is_decoded_again(tokenizer: ByteTokenizer) -> None:
    decoded: list[int] = []

    def decode(tokens: Sequence[int]) -> str:
        decoded.append(len(tokens))
        return tokenizer.decode(tokens)

    tokens = tokenizer.encode("abc" * 100 + "🎉" * 10)
    assert stop_index(StopRule((), ["never"], decode), tokens) is None
    assert max(decoded) <= 8
    decoded.clear()
    assert stop_index(StopRule((), ["never"], decode, begun=tokens[:200]), tokens[200:]) is None
    assert sum(length > 8 for length in decoded) <= 3, "an answer that was begun is settled at once"
