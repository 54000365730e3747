"""Text from tokens, as it is generated: whole characters only, and nothing of a stop sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TextStream:
    """Turns tokens, one at a time, into text that will not change any more.

    A character's bytes may be spread over several tokens, and what looks like the beginning of a stop sequence is held
    back until it is none. `has_stopped` once a stop sequence is complete; it and what follows it are never given out.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), prompt: Sequence[int] = ()) -> None:
        """`prompt` are the tokens before: whether a text begins with a space may depend on them.

        Raises:
            ValueError: a stop sequence is empty.
        """
        if not all(stop):
            raise ValueError("a stop sequence is empty")
        self.has_stopped = False
        self._stop = tuple(stop)
        self._held = ""
        self._decode = _decoder(tokenizer, prompt)

    def add(self, token: int) -> str:
        """The text that is certain with this token; often empty."""
        if self.has_stopped:
            return ""
        self._held += self._decode(token)
        found = [place for sequence in self._stop if (place := self._held.find(sequence)) >= 0]
        if found:
            self.has_stopped = True
            return self._release(min(found))
        return self._release(len(self._held) - self._beginning())

    def end(self) -> str:
        """What was held back and turned out to be no stop sequence. A character that is not whole is left out."""
        return "" if self.has_stopped else self._release(len(self._held))

    def _beginning(self) -> int:
        """How many characters at the end may be the beginning of a stop sequence."""
        longest = max((len(sequence) - 1 for sequence in self._stop), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(sequence.startswith(self._held[-length:]) for sequence in self._stop):
                return length
        return 0

    def _release(self, length: int) -> str:
        released, self._held = self._held[:length], self._held[length:]
        return released


def _decoder(tokenizer: Tokenizer, prompt: Sequence[int]) -> Callable[[int], str]:
    stream = DecodeStream(ids=list(prompt), skip_special_tokens=True)
    return lambda token: stream.step(tokenizer, token) or ""
