"""Render conversations to tokens and masks. All training text is tokenized here.

With `apply_chat_template` the tokenizer's chat template renders the text. Without it the contents are concatenated and
every assistant turn ends with the eos token. SFT, RL and preference learning share `_prompt`: an assistant turn is
trained on after exactly the tokens that the policy receives as its prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from novarl.core.types import Message, Tokenizer
from novarl.data.continuation import decode, encode, extend, text_after
from novarl.data.formats import Refused, is_trained, shared_length
from novarl.data.template import turn_ends, turn_shape, write
from novarl.data.thoughts import after_opened_thought

Rendered = tuple[tuple[int, ...], tuple[bool, ...]]
"""Tokens and loss mask."""


def render_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    apply_chat_template: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """The prompt tokens of the policy, up to the end of the assistant turn's header; `template_kwargs` are arguments of
    the template, such as `tools`. NovaError: there is no chat template. Refused: it rejects the messages, or nothing is
    rendered."""
    _, tokens = _prompt(tokenizer, messages, apply_chat_template, template_kwargs)
    if not apply_chat_template:
        tokens = [*_missing_bos(tokenizer, tokens), *tokens]
    if not tokens:
        raise Refused("", "the rendered prompt is empty")
    return tuple(tokens)


def render_sft(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    context: int = 0,
    apply_chat_template: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[Rendered]:
    """Tokens and mask of a conversation. The loss covers every assistant turn after the first `context` messages,
    except turns with `weight: 0` or `train: false`: the content and its end token, not the header or the white space
    that separates turns. If the template ends a turn in plain text or not at all, the eos token is appended.

    The result is usually one sequence. A turn whose prompt does not begin with the sequence so far (the template drops
    earlier thoughts, or omits an eos that was trained on) starts a new one, so that each turn is trained on after
    exactly the tokens that precede it at inference. Refused: the template rejects the messages, contradicts itself, or
    leaves nothing to train on.
    """
    sequences: list[tuple[list[int], list[bool]]] = []
    ends = turn_ends(tokenizer) if apply_chat_template else (tokenizer.eos_token_id,)
    for index, message in enumerate(messages):
        if index < context or message["role"] != "assistant" or not is_trained(message):
            continue
        text, prompt = _prompt(tokenizer, messages[:index], apply_chat_template, template_kwargs)
        if apply_chat_template:
            turn = _turn(tokenizer, messages[: index + 1], text, template_kwargs)
        else:
            turn = _content(message)
        tokens, begin = extend(tokenizer, text, prompt, turn)
        if not tokens or tokens[-1] not in ends:
            tokens.append(tokenizer.eos_token_id)
        before, mask = sequences[-1] if sequences else ([], [])
        if not sequences or begin < len(before) or tokens[: len(before)] != before:
            before, mask = [], []
        else:
            sequences.pop()
        sequences.append((tokens, mask + [False] * (begin - len(before)) + [True] * (len(tokens) - begin)))
    if not sequences:
        raise Refused("", "has no assistant turn to train on")
    starts = [[] if apply_chat_template else _missing_bos(tokenizer, tokens) for tokens, _ in sequences]
    return [
        ((*start, *tokens), (*(False for _ in start), *mask))
        for start, (tokens, mask) in zip(starts, sequences, strict=True)
    ]


def turn_text(
    tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int], *, ended: bool, apply_chat_template: bool = True
) -> str:
    """The content of a turn that was sampled as `tokens` after `prompt`: the inverse of rendering. Special tokens are
    kept. With `ended` the last token, which ended the turn, is removed, and what the chat template writes around the
    content."""
    kept = list(tokens[:-1] if ended else tokens)
    if not apply_chat_template or not tokenizer.chat_template:
        return text_after(tokenizer, prompt, kept)
    shape = turn_shape(tokenizer)
    closing = shape.closing if shape.end is None else shape.closing.removesuffix(decode(tokenizer, [shape.end]))
    if ended and closing:
        own = encode(tokenizer, closing)
        if kept[-len(own) :] == own:  # also if the tokenizer does not preserve white space
            kept, closing = kept[: -len(own)], ""
    text = text_after(tokenizer, prompt, kept).removeprefix(shape.opening)
    return text.removesuffix(closing) if ended else text


def _prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    apply_chat_template: bool,
    template_kwargs: Mapping[str, Any] | None,
) -> tuple[str, list[int]]:
    """The text and tokens before the next assistant turn, without a bos token that is not part of the text."""
    if apply_chat_template:
        text = write(tokenizer, messages, generation=True, template_kwargs=template_kwargs)
        for tool in (template_kwargs or {}).get("tools") or ():
            name = _name(tool)
            if name is not None and name not in text:
                raise Refused("tools", f"the chat template does not render the tool {name!r}")
        return text, encode(tokenizer, text)
    text, tokens = "", list[int]()
    eos = tokenizer.eos_token_id
    for answers, turns in groupby(messages, lambda message: bool(message["role"] == "assistant")):
        contents = [_content(message) for message in turns]
        for content in contents if answers else ["".join(contents)]:
            tokens, _ = extend(tokenizer, text, tokens, content)
            text += content
            if answers and tokens[-1:] != [eos]:
                tokens.append(eos)
                text += decode(tokenizer, [eos])
    return text, tokens


def _content(message: Message) -> str:
    """A message's text when no template is used."""
    if message.get("tool_calls"):
        raise Refused("", "has tool calls, which require a chat template")
    return str(message["content"])


def _turn(
    tokenizer: Tokenizer, messages: Sequence[Message], header: str, template_kwargs: Mapping[str, Any] | None
) -> str:
    """The policy's text after `header` in the last of `messages`, including the end of the turn."""
    message = messages[-1]
    whole = write(tokenizer, messages, generation=False, template_kwargs=template_kwargs)
    text = whole[len(header) :] if whole.startswith(header) else after_opened_thought(header, whole, message)
    if text is None:
        raise Refused("", _contradiction(header, whole))
    shape = turn_shape(tokenizer)
    # After the end of a turn, templates add at least a line break, which a stopped policy never generates.
    text = text.removesuffix(shape.written) + shape.closing if text.endswith(shape.written) else text.rstrip()
    if not text:
        raise Refused("", "the chat template renders an assistant turn as empty")
    for call in message.get("tool_calls") or ():
        name = _name(call)
        if name is not None and name not in text:
            raise Refused("", f"the chat template does not render the tool call {name!r}")
    return text


def _name(tool: Any) -> str | None:
    """The name of a tool or tool call."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _contradiction(header: str, whole: str) -> str:
    same = shared_length(header, whole)
    return (
        "the chat template is inconsistent: the prompt it renders for the assistant "
        f"(... {header[max(0, same - 20) : same + 30]!r}) is not a prefix of the finished turn "
        f"(... {whole[max(0, same - 20) : same + 30]!r}); set another chat_template, or "
        "apply_chat_template=false"
    )


def _missing_bos(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[int]:
    """The bos token, if the tokenizer adds one to every text and the text does not begin with it already (chat
    templates usually do)."""
    bos = getattr(tokenizer, "bos_token_id", None)
    first = list(tokenizer.encode("", add_special_tokens=True))[:1]
    return first if first and first[0] == bos and list(tokens[:1]) != first else []
