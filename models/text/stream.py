"""Turns generated tokens into text: whole characters only, and no part of a stop sequence."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

# This character replaces bytes that are no character.
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A character has at most four bytes (RFC 3629). Four tokens without a whole character never make one.
_MOST_PARTS = 4
# The text of a token, such as its leading space, may depend on this many tokens before it.
_CONTEXT = 6


class TextStream:
    """Turns tokens, one at a time, into text that will not change later.

    `DecodeStream` of tokenizers 0.23 repeats a prompt that ends in U+FFFD, and raises if bytes are no character.

    The bytes of a character may be spread over several tokens. Text that may begin a stop sequence is held back. Once a
    stop sequence is complete, `has_stopped` is true; the sequence and the text after it are dropped.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), prompt: Sequence[int] = ()) -> None:
        """`prompt` has the earlier tokens: a leading space may depend on them.

        Raises:
            ValueError: a stop sequence is empty.
        """
        if not all(stop):
            raise ValueError("a stop sequence is empty")
        self.has_stopped = False
        self._tokenizer, self._stop, self._held = tokenizer, tuple(stop), ""
        # The last tokens that were given out, and those that make no whole character yet.
        self._known = list(prompt[-_CONTEXT:])
        self._new: list[int] = []
        if self._text(self._known).endswith(_REPLACEMENT):
            self._known = []

    def add(self, token: int) -> str:
        """The text that this token completes, which is often empty."""
        self._new.append(token)
        is_whole = not self._text([*self._known, *self._new]).endswith(_REPLACEMENT)
        return self._take() if is_whole or len(self._new) >= _MOST_PARTS else ""

    def end(self) -> str:
        """The text that was held back. Bytes that are no whole character become U+FFFD."""
        text = self._take()
        return text if self.has_stopped else text + self._release(len(self._held))

    def _take(self) -> str:
        """What can be given out once the new tokens are text, whole or not.

        After a stop sequence, which is then at the beginning of what is held back, nothing is.
        """
        before, now = self._text(self._known), self._text([*self._known, *self._new])
        self._known, self._new = self._new, []
        self._held += now[len(before) :]
        ends = [place + len(sequence) for sequence, place in self._found(self._held)]
        if not ends:
            return self._release(len(self._held) - self._beginning())
        self.has_stopped = True
        return self._release(min(place for _, place in self._found(self._held[: min(ends)])))

    def _found(self, text: str) -> list[tuple[str, int]]:
        """The stop sequences in `text`, and where each begins."""
        return [(sequence, place) for sequence in self._stop if (place := text.find(sequence)) >= 0]

    def _beginning(self) -> int:
        """The number of characters at the end that may begin a stop sequence."""
        ends = (self._held[place:] for place in range(len(self._held)))
        return next((len(end) for end in ends if any(sequence.startswith(end) for sequence in self._stop)), 0)

    def _release(self, length: int) -> str:
        released, self._held = self._held[:length], self._held[length:]
        return released

    def _text(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)
