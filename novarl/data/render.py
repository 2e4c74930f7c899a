"""From conversations to tokens and masks. The only place where text becomes training tokens.

With `apply_chat_template` the tokenizer's chat template writes the text; without it the contents are joined as they
are. The prompt's tokens are the same in SFT and in RL: whatever follows, they are those of the prompt alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from novarl.core.errors import NovaError
from novarl.core.types import Message, Tokenizer
from novarl.data.formats import Refused

Rendered = tuple[tuple[int, ...], tuple[bool, ...]]
"""Tokens, and where the loss is."""


def render_prompt(
    tokenizer: Tokenizer, messages: Sequence[Message], *, apply_chat_template: bool = True
) -> tuple[int, ...]:
    """The tokens after which the policy speaks: up to the end of the assistant turn's header.

    NovaError: the tokenizer has no chat template. Refused: the template does not take these messages, or nothing is
    left of them.
    """
    if apply_chat_template:
        tokens = _encode(tokenizer, _template(tokenizer, messages, generation=True))
    else:
        tokens = _start(tokenizer) + _encode(tokenizer, "".join(message["content"] for message in messages))
    if not tokens:
        raise Refused("", "the prompt renders to no tokens")
    return tuple(tokens)


def render_sft(
    tokenizer: Tokenizer, messages: Sequence[Message], *, context: int = 0, apply_chat_template: bool = True
) -> list[Rendered]:
    """Tokens and mask of a conversation, with loss on every assistant turn after the first `context` messages.

    Trained on are the turn's content and the token that ends it, not its header (and not the white space by which
    templates separate turns). Without a template every trained turn ends with the eos token.

    Usually this is one sequence. Some templates rewrite earlier turns (Qwen3's drops their thoughts); a turn whose
    prompt is then no longer what the sequence so far says begins a sequence of its own, so that each turn is learnt
    after exactly the tokens that would precede it in use. NovaError: the template contradicts itself, or there is none.
    """
    spans = _templated(tokenizer, messages, context) if apply_chat_template else _joined(messages, context)
    start = [] if apply_chat_template else _start(tokenizer)
    return [_tokens(tokenizer, parts, start) for parts in spans]


@dataclass(frozen=True, slots=True)
class _Turn:
    """What precedes an assistant turn (since the last one), the turn, and whether eos has to be added to end it."""

    before: str
    text: str
    add_eos: bool


def _joined(messages: Sequence[Message], context: int) -> list[list[_Turn]]:
    turns, before = [], ""
    for index, message in enumerate(messages):
        if index >= context and message["role"] == "assistant":
            turns.append(_Turn(before, message["content"], add_eos=True))
            before = ""
        else:
            before += message["content"]
    return [turns]


def _templated(tokenizer: Tokenizer, messages: Sequence[Message], context: int) -> list[list[_Turn]]:
    sequences: list[list[_Turn]] = []
    so_far = ""
    for index, message in enumerate(messages):
        if index < context or message["role"] != "assistant":
            continue
        header = _template(tokenizer, messages[:index], generation=True)
        whole = _template(tokenizer, messages[: index + 1], generation=False)
        if not whole.startswith(header):
            raise _contradiction(header, whole)
        # Templates end a turn with a line break that the policy, stopped at the end token, never writes.
        text = whole[len(header) :].rstrip()
        if not text:
            raise Refused("", "the chat template leaves nothing of an assistant turn")
        if not so_far or not header.startswith(so_far):
            sequences.append([])
            so_far = ""
        # A template that writes no end token: without one the policy would never learn to stop.
        content, last = message["content"].rstrip(), index == len(messages) - 1
        unended = last and content != "" and text.endswith(content)
        sequences[-1].append(_Turn(header[len(so_far) :], text, add_eos=unended))
        so_far = header + text
    return sequences


def _contradiction(header: str, whole: str) -> NovaError:
    same = next((i for i, pair in enumerate(zip(header, whole, strict=False)) if pair[0] != pair[1]), len(whole))
    what = (
        "the tokenizer's chat template contradicts itself: the prompt it writes for the assistant "
        f"(... {header[max(0, same - 20) : same + 30]!r}) is not how it writes the finished turn "
        f"(... {whole[max(0, same - 20) : same + 30]!r})"
    )
    fix = "give the tokenizer another template, or set apply_chat_template=false"
    return NovaError(what, where="chat_template", fix=fix)


def _template(tokenizer: Tokenizer, messages: Sequence[Message], *, generation: bool) -> str:
    if not tokenizer.chat_template:
        raise NovaError("the tokenizer has no chat template", where="model", fix="set apply_chat_template=false")
    try:
        text: Any = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=generation)
    except Exception as error:  # templates refuse conversations (roles that must alternate) by raising
        raise Refused("", f"the chat template refuses the row: {type(error).__name__}: {error}") from error
    return str(text)


def _tokens(tokenizer: Tokenizer, turns: Sequence[_Turn], start: list[int]) -> Rendered:
    tokens, mask = list(start), [False] * len(start)
    parts: list[tuple[str, bool]] = []
    for position, turn in enumerate(turns):
        parts += [(turn.before, False), (turn.text, True)]
        if turn.add_eos or position == len(turns) - 1:
            for piece, trained in zip(_encode_parts(tokenizer, [text for text, _ in parts]), parts, strict=True):
                tokens += piece
                mask += [trained[1]] * len(piece)
            parts = []
        if turn.add_eos:
            tokens.append(tokenizer.eos_token_id)
            mask.append(True)
    return tuple(tokens), tuple(mask)


def _encode_parts(tokenizer: Tokenizer, parts: Sequence[str]) -> list[list[int]]:
    """The tokens of each part: those of the joined text where no token lies across a border, else each part's own.

    The first keeps what tokenizers do at the start of a text only (SentencePiece's space) out of the middle; the second
    keeps the prompt's tokens what they are without the answer.
    """
    whole = _encode(tokenizer, "".join(parts))
    cuts = [0]
    for count in range(1, len(parts) + 1):
        begun = _encode(tokenizer, "".join(parts[:count]))
        if whole[: len(begun)] != begun:
            return [_encode(tokenizer, part) for part in parts]
        cuts.append(len(begun))
    return [whole[a:b] for a, b in pairwise(cuts)]


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def _start(tokenizer: Tokenizer) -> list[int]:
    """The bos token, for tokenizers that begin every text with one (a chat template writes its own)."""
    first = list(tokenizer.encode("", add_special_tokens=True))[:1]
    return first if first and first[0] == getattr(tokenizer, "bos_token_id", None) else []
