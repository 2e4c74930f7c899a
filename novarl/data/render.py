"""From conversations to tokens and masks. The only place where text becomes training tokens.

With `apply_chat_template` the tokenizer's chat template writes the text. Without it the contents are joined as they
are, and every assistant turn ends with the eos token. SFT, RL and preference learning share `_prompt`: an assistant
turn is trained on after exactly the tokens that the policy is given before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from novarl.core.types import Message, Tokenizer
from novarl.data.continuation import decode, encode, extend, text_after
from novarl.data.formats import Refused, is_trained
from novarl.data.template import turn_ends, turn_shape, write
from novarl.data.thoughts import after_opened_thought

Rendered = tuple[tuple[int, ...], tuple[bool, ...]]
"""Tokens, and where the loss is."""


def render_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    apply_chat_template: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """The tokens after which the policy speaks: up to the end of the assistant turn's header.

    template_kwargs: what the template is given beside the messages, such as `tools` or `enable_thinking`

    NovaError: the tokenizer has no chat template. Refused: the template does not take these messages, or nothing is
    left of them.
    """
    _, tokens = _prompt(tokenizer, messages, apply_chat_template, template_kwargs)
    if not apply_chat_template:
        tokens = [*_missing_bos(tokenizer, tokens), *tokens]
    if not tokens:
        raise Refused("", "the prompt renders to no tokens")
    return tuple(tokens)


def render_sft(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    context: int = 0,
    apply_chat_template: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[Rendered]:
    """Tokens and mask of a conversation, with loss on every assistant turn after the first `context` messages, except
    those with `weight: 0` or `train: false`.

    Trained on are the turn's content and the token that ends it, not its header (and not the white space by which
    templates separate turns). A turn that the template ends in text, or not at all, is ended by the eos token.

    Usually this is one sequence. A turn whose prompt does not begin with the sequence so far (templates that drop
    earlier thoughts, or that write no eos where one was trained) begins a sequence of its own, so that each turn is
    learnt after exactly the tokens that would precede it in use. Refused: the template does not take these messages,
    contradicts itself, or leaves nothing to learn.
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
        raise Refused("", "holds no assistant turn to learn from")
    starts = [[] if apply_chat_template else _missing_bos(tokenizer, tokens) for tokens, _ in sequences]
    return [
        ((*start, *tokens), (*(False for _ in start), *mask))
        for start, (tokens, mask) in zip(starts, sequences, strict=True)
    ]


def turn_text(
    tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int], *, ended: bool, apply_chat_template: bool = True
) -> str:
    """The content of a turn that was sampled as `tokens` after `prompt`: the inverse of what rendering does with it.

    Special tokens stay; with `ended` the last token, which only ended the turn, goes. So do the white space and the
    text that the chat template itself writes around a content.
    """
    kept = list(tokens[:-1] if ended else tokens)
    if not apply_chat_template or not tokenizer.chat_template:
        return text_after(tokenizer, prompt, kept)
    shape = turn_shape(tokenizer)
    closing = shape.closing if shape.end is None else shape.closing.removesuffix(decode(tokenizer, [shape.end]))
    if ended and closing:
        own = encode(tokenizer, closing)
        if kept[-len(own) :] == own:  # also where the tokenizer does not keep a text's white space
            kept, closing = kept[: -len(own)], ""
    text = text_after(tokenizer, prompt, kept).removeprefix(shape.opening)
    return text.removesuffix(closing) if ended else text


def _prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    apply_chat_template: bool,
    template_kwargs: Mapping[str, Any] | None,
) -> tuple[str, list[int]]:
    """What precedes the next assistant turn, as text and as tokens, without the bos token that no text holds."""
    if apply_chat_template:
        text = write(tokenizer, messages, generation=True, template_kwargs=template_kwargs)
        for tool in (template_kwargs or {}).get("tools") or ():
            name = _name(tool)
            if name is not None and name not in text:
                raise Refused("tools", f"the chat template does not declare the tool {name!r}")
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
    """A message's text where no template writes it."""
    if message.get("tool_calls"):
        raise Refused("", "holds tool calls, which only a chat template can write")
    return str(message["content"])


def _turn(
    tokenizer: Tokenizer, messages: Sequence[Message], header: str, template_kwargs: Mapping[str, Any] | None
) -> str:
    """What the policy writes after `header` in the last of `messages`, the end of its turn included."""
    message = messages[-1]
    whole = write(tokenizer, messages, generation=False, template_kwargs=template_kwargs)
    text = whole[len(header) :] if whole.startswith(header) else after_opened_thought(header, whole, message)
    if text is None:
        raise Refused("", _contradiction(header, whole))
    shape = turn_shape(tokenizer)
    # Templates go on behind the end of a turn, with a line break at least, which the stopped policy never writes.
    text = text.removesuffix(shape.written) + shape.closing if text.endswith(shape.written) else text.rstrip()
    if not text:
        raise Refused("", "the chat template leaves nothing of an assistant turn")
    for call in message.get("tool_calls") or ():
        name = _name(call)
        if name is not None and name not in text:
            raise Refused("", f"the chat template does not write the tool call {name!r}")
    return text


def _name(tool: Any) -> str | None:
    """The name of a tool or of a call to one."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _contradiction(header: str, whole: str) -> str:
    same = next((i for i, pair in enumerate(zip(header, whole, strict=False)) if pair[0] != pair[1]), len(whole))
    return (
        "the chat template contradicts itself: the prompt it writes for the assistant "
        f"(... {header[max(0, same - 20) : same + 30]!r}) is not how it writes the finished turn "
        f"(... {whole[max(0, same - 20) : same + 30]!r}); set chat_template to another one, or "
        "apply_chat_template=false"
    )


def _missing_bos(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[int]:
    """The bos token, for tokenizers that begin every text with one, where the text does not begin with it already (a
    chat template writes its own)."""
    bos = getattr(tokenizer, "bos_token_id", None)
    first = list(tokenizer.encode("", add_special_tokens=True))[:1]
    return first if first and first[0] == bos and list(tokens[:1]) != first else []
