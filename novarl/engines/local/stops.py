"""Stop tokens and stop strings of a completion."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

Decode = Callable[[Sequence[int]], str]

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class StopRule:
    """Watches one completion: `feed(token)` is True at the token that ends it.

    A stop string may begin and end anywhere within tokens. Tokens are final once their text does not end within a
    character; only later ones are decoded again, after the last final tokens, because a tokenizer may decode a token
    differently at the start of a text. begun: the preceding tokens of a continued answer, in whose text a stop may
    begin.
    """

    def __init__(
        self, tokens: Collection[int], strings: Sequence[str], decode: Decode, *, begun: Sequence[int] = ()
    ) -> None:
        self.tokens, self.strings = frozenset(tokens), tuple(strings)
        self._decode = decode
        self._longest = max(map(len, strings), default=0)
        self._tail = ""
        self._settled: list[int] = []
        self._pending = list(begun)  # final with the first token that is fed

    def feed(self, token: int) -> bool:
        """Process the next token and return whether the completion stops."""
        return token in self.tokens or (bool(self.strings) and self._completes_string(token))

    def _completes_string(self, token: int) -> bool:
        self._pending.append(token)
        before, after = self._decode(self._settled), self._decode(self._settled + self._pending)
        new = after[len(before) :]
        text = self._tail + new
        if any(string in text for string in self.strings):
            return True
        if new and not new.endswith(_INCOMPLETE):
            self._tail = text[max(0, len(text) - self._longest + 1) :]
            self._settled, self._pending = self._pending, []
        return False
