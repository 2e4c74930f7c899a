"""When a completion stops by itself: at a stop token, or at the token that completes a stop string."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

Decode = Callable[[Sequence[int]], str]

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class StopRule:
    """Watches one completion: `feed(token)` is True at the token that ends it.

    A stop string may begin and end anywhere within tokens. Only text that is not settled yet is decoded again, behind
    the tokens settled last, since a tokenizer may render a token otherwise at the start of a text. Tokens are settled
    once they have a text that does not end within a character.

    begun: the tokens before, of the answer that the completion goes on with: a stop string may begin in their text
    """

    def __init__(
        self, tokens: Collection[int], strings: Sequence[str], decode: Decode, *, begun: Sequence[int] = ()
    ) -> None:
        self.tokens, self.strings = frozenset(tokens), tuple(strings)
        self._decode = decode
        self._longest = max(map(len, strings), default=0)
        self._tail = ""
        self._settled: list[int] = []
        self._pending = list(begun)  # settled with the first token that is fed

    def feed(self, token: int) -> bool:
        """Take the completion's next token; whether it stops there."""
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
