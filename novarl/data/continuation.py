"""Text that goes on where other text ends, as tokens: what is read back is the text, whatever the tokenizer.

Tokenizers treat the start of a text in their own way (SentencePiece's kind writes a space before it), and join letters
across the border between prompt and answer. The prompt's tokens must stay those of the prompt alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from typing import Any, cast

from novarl.core.types import Tokenizer
from novarl.data.formats import Refused

_ANCHORS = ("\n", ":", ".", "1", *"aeinorstx")


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text, with none added at either end. Refused: the tokenizer cannot read it."""
    try:
        return list(tokenizer.encode(text, add_special_tokens=False))
    except Exception as error:  # a lone surrogate, say
        raise Refused("", f"the tokenizer cannot read the text: {type(error).__name__}: {error}") from error


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of tokens, special ones included, with no space removed afterwards."""
    if getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    return str(tokenizer.decode(tokens, skip_special_tokens=False))


def extend(tokenizer: Tokenizer, before: str, tokens: Sequence[int], text: str) -> tuple[list[int], int]:
    """The tokens of `before + text`, and where those of `text` begin. `tokens` are those of `before` alone.

    They begin with `tokens` wherever some tokens can follow these and say exactly `text`: those of the whole, those of
    `text` alone, or those it has behind another text. Where there are none (a word-level tokenizer whose word lies
    across the border), they are the tokens of the whole, and the token across the border belongs to `text`.
    """
    tokens = list(tokens)
    whole = encode(tokenizer, before + text)
    if whole[: len(tokens)] == tokens:
        return whole, len(tokens)
    wanted = decode(tokenizer, whole)
    for following in _renderings(tokenizer, text):
        if decode(tokenizer, tokens + following) == wanted:
            return tokens + following, len(tokens)
    same = next((i for i, (a, b) in enumerate(zip(tokens, whole, strict=False)) if a != b), len(whole))
    return whole, same


def text_after(tokenizer: Tokenizer, before: Sequence[int], tokens: Sequence[int]) -> str:
    """What `tokens` add to the text of `before`. Decoded alone they may lose their first space."""
    last = list(before[-1:])
    begun = decode(tokenizer, last)
    text = decode(tokenizer, [*last, *tokens])
    if not text.startswith(begun):  # a character that was cut in two
        return decode(tokenizer, tokens)
    added = text[len(begun) :]
    if added.startswith(" ") and _writes_spaces_itself(cast("Hashable", tokenizer)):
        return added[1:]
    return added


@lru_cache(maxsize=8)
def _writes_spaces_itself(tokenizer: Any) -> bool:
    """Whether the tokenizer reads no spaces and decodes its tokens with one between them, as word-level ones do."""
    return encode(tokenizer, "a  a") == encode(tokenizer, "a a")


def _renderings(tokenizer: Tokenizer, text: str) -> Iterator[list[int]]:
    """Tokens that `text` may have: alone, and behind a few other texts."""
    yield encode(tokenizer, text)
    for anchor in (decode(tokenizer, [tokenizer.eos_token_id]), *_ANCHORS):
        begun, both = encode(tokenizer, anchor), encode(tokenizer, anchor + text)
        if begun and both[: len(begun)] == begun:
            yield both[len(begun) :]
