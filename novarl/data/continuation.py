"""Tokenize text that continues other text, so that decoding gives the text back with any tokenizer.

Many tokenizers treat the start of a text specially (SentencePiece adds a space) and merge characters across the
boundary between prompt and answer. The prompt must keep the tokens it has on its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from typing import Any, cast

from novarl.core.types import Tokenizer
from novarl.data.formats import Refused, shared_length

_ANCHORS = ("\n", ":", ".", "1", *"aeinorstx")


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokenize a text without adding special tokens. Raises Refused if the tokenizer fails."""
    try:
        return list(tokenizer.encode(text, add_special_tokens=False))
    except Exception as error:  # for example a lone surrogate
        raise Refused("", f"the tokenizer cannot encode the text: {type(error).__name__}: {error}") from error


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Decode tokens, keeping special tokens and without cleaning up spaces."""
    if getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    return str(tokenizer.decode(tokens, skip_special_tokens=False))


def extend(tokenizer: Tokenizer, before: str, tokens: Sequence[int], text: str) -> tuple[list[int], int]:
    """The tokens of `before + text`, and the index of the first one of `text`. `tokens` are those of `before` alone.
    The result begins with them if some continuation decodes to exactly `text`: that of the whole, of `text` alone, or
    of `text` after another text. Otherwise (a word of a word-level tokenizer crosses the boundary) it is the tokens of
    the whole, and the token that crosses the boundary belongs to `text`."""
    tokens = list(tokens)
    whole = encode(tokenizer, before + text)
    if whole[: len(tokens)] == tokens:
        return whole, len(tokens)
    wanted = decode(tokenizer, whole)
    for following in _renderings(tokenizer, text):
        if decode(tokenizer, tokens + following) == wanted:
            return tokens + following, len(tokens)
    return whole, shared_length(tokens, whole)


def text_after(tokenizer: Tokenizer, before: Sequence[int], tokens: Sequence[int]) -> str:
    """The text that `tokens` add to the text of `before`. Decoded on their own they may lose their first space."""
    last = list(before[-1:])
    begun = decode(tokenizer, last)
    text = decode(tokenizer, [*last, *tokens])
    if not text.startswith(begun):  # a character split across tokens
        return decode(tokenizer, tokens)
    added = text[len(begun) :]
    if added.startswith(" ") and _writes_spaces_itself(cast("Hashable", tokenizer)):
        return added[1:]
    return added


@lru_cache(maxsize=8)
def _writes_spaces_itself(tokenizer: Any) -> bool:
    """Whether the tokenizer ignores spaces and puts one between tokens when decoding, as word-level tokenizers do."""
    return encode(tokenizer, "a  a") == encode(tokenizer, "a a")


def _renderings(tokenizer: Tokenizer, text: str) -> Iterator[list[int]]:
    """Possible tokenizations of `text`: alone, and after a few other texts."""
    yield encode(tokenizer, text)
    for anchor in (decode(tokenizer, [tokenizer.eos_token_id]), *_ANCHORS):
        begun, both = encode(tokenizer, anchor), encode(tokenizer, anchor + text)
        if begun and both[: len(begun)] == begun:
            yield both[len(begun) :]
