"""Stop strings: where a completion's text, decoded token by token, first holds one."""

from typing import Any

TAIL_TOKENS = 6
"""Tokens that are decoded again with each new one: bytes and leading spaces read differently on their own."""


class StopStrings:
    """Finds stop strings in one completion's text, token by token, across token boundaries.

    Only the tail is decoded. A text that ends in U+FFFD may hold half a character: what is complete is searched, and
    the tail is decoded again with the next token. Special tokens count as text: a stop string may name them.
    """

    def __init__(self, tokenizer: Any, stops: tuple[str, ...], prompt: list[int]) -> None:
        self.tokenizer = tokenizer
        self.stops = stops
        self.ids = prompt[-TAIL_TOKENS:]
        self.known = self._decode()
        self.tail = ""

    def add(self, token_id: int) -> str | None:
        """Append a token. Returns the stop string that ends first in the text it adds, or None."""
        self.ids.append(token_id)
        text = self._decode()
        window = self.tail + text[len(self.known) :]
        found = []
        for stop in self.stops:
            # A match must end in the new part; earlier ones were seen (or lie below min_new_tokens).
            at = window.find(stop, max(0, len(self.tail) - len(stop) + 1))
            if at >= 0:
                found.append((at + len(stop), stop))
        # Endless broken bytes would let the tail grow with the completion; give up on them after a while.
        if not text.endswith("\ufffd") or len(self.ids) > 4 * TAIL_TOKENS:
            self.tail = window[-max(map(len, self.stops)) :]
            self.ids = self.ids[-TAIL_TOKENS:]
            self.known = self._decode()
        return min(found)[1] if found else None

    def _decode(self) -> str:
        return self.tokenizer.decode(self.ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
