"""The text of single tokens."""

from __future__ import annotations

import re
from typing import Any


def piece(tokenizer: Any, token: int) -> str | list[int]:
    """The text of one token, with the space that it begins with, or its bytes if they are part of a character."""
    names = getattr(tokenizer, "convert_ids_to_tokens", None)
    name = names([token])[0] if names is not None else None
    if name is not None and (byte := re.fullmatch("<0x([0-9A-F]{2})>", name)):
        return [int(byte[1], 16)]
    if name is not None and name.startswith("\u2581"):  # the space of SentencePiece, which decoding would strip
        return name.replace("\u2581", " ")
    text = tokenizer.decode([token])
    if "\ufffd" not in text:
        return text
    if name is None:
        return [token] if token < 256 else text
    bytes_ = [_BYTES.get(character) for character in name]
    return text if None in bytes_ else [byte for byte in bytes_ if byte is not None]


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE vocabularies (GPT-2 and later) write for bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_alphabet()
