"""Turns generated tokens into text: whole characters only, and no part of a stop sequence."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import dropwhile, filterfalse, islice

from tokenizers import Tokenizer

# This character replaces bytes that are no character.
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# How the names of tokens of one byte begin.
_BYTE = "<0x"
# The text of a token may depend on the token before it, and on whether any text is before it.
_CONTEXT = 4


class TextStream:
    """Turns tokens, one at a time, into text that will not change later.

    The pieces together are the text that `tokenizer.decode(tokens, skip_special_tokens=True)` has after the text of the
    prompt. What a later token may change is held back: an unfinished character, or a run of bytes.

    Stop sequences are searched in the answer with its special tokens. Text that may begin one is held back. Once one is
    complete, `has_stopped` is true; the sequence and the text after it are dropped.

    `DecodeStream` of tokenizers 0.23 repeats a prompt that ends in U+FFFD, and raises if bytes are no character.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        prompt: Sequence[int] = (),
        ends: Collection[int] = (),
        least: int = 0,
    ) -> None:
        """The answer follows `prompt`. Its tokens that are in `ends` are no text, like special ones. In the text of its
        first `least` tokens, no stop sequence is looked for.

        Raises:
            ValueError: a stop sequence is empty.
        """
        if not all(stop):
            raise ValueError("a stop sequence is empty")
        self.has_stopped = False
        self._tokenizer, self._stop, self._ends = tokenizer, tuple(stop), ends
        self._least = least
        # The last tokens; how many characters of theirs were given out; where the search for stop sequences begins.
        self._tokens, self._given, self._start = [], 0, 0
        self._begin(prompt)

    def add(self, token: int) -> str:
        """The text that this token completes, which is often empty."""
        self._tokens.append(token)
        if self._least > 0:
            self._least -= 1
            self._start = len(self._marked(self._tokens))
        return self._take(is_end=False)

    def end(self) -> str:
        """The text that was held back. Bytes that are no whole character become U+FFFD."""
        return "" if self.has_stopped else self._take(is_end=True)

    def _begin(self, tokens: Sequence[int]) -> None:
        """Keep the last tokens that are text by themselves. All text of `tokens` was given out."""
        context = list(islice(filterfalse(self._is_open, reversed(tokens)), _CONTEXT))[::-1]
        if self._shown(context) or not self._shown(tokens):  # else the next text would count as the first one
            self._tokens = context
            self._given = self._start = len(self._shown(context))

    def _take(self, *, is_end: bool) -> str:
        """What can be given out. At the end, nothing is held back."""
        shown, marked = self._shown(self._tokens), self._marked(self._tokens) if self._stop else ""
        settled, held = len(shown), 0
        if not is_end:
            settled, marked = self._settled(), marked.removesuffix(_REPLACEMENT)
            held = self._beginning(marked[self._start :])
        found = [(place + len(stop), place) for stop in self._stop if (place := marked.find(stop, self._start)) >= 0]
        if found:
            self.has_stopped, settled = True, self._place(min(found)[1])
        elif held:
            settled = min(settled, self._place(len(marked) - held))
        released = shown[self._given : settled]
        self._given += len(released)
        if self._given == len(shown) and not held and len(self._tokens) > 2 * _CONTEXT:
            self._begin(self._tokens)
        return released

    def _settled(self) -> int:
        """The number of shown characters that stay, whatever token comes next.

        A byte may complete a character. Decoders with a byte fallback replace a whole run of bytes that is no text. The
        end of a word may be a space if another word follows.
        """
        tokens = list(dropwhile(self._is_open, reversed(self._tokens)))[::-1]
        text = self._shown(tokens)
        return len(text.removesuffix(_REPLACEMENT)) if self._shown(tokens * 2).startswith(text) else self._given

    def _place(self, marked: int) -> int:
        """The number of shown characters before a place in the text with special tokens."""
        number = bisect_right(range(len(self._tokens)), marked, key=lambda n: len(self._marked(self._tokens[:n])))
        before, after = self._tokens[: number - 1], self._tokens[:number]
        return max(len(self._shown(before)), len(self._shown(after)) - len(self._marked(after)) + marked)

    def _beginning(self, text: str) -> int:
        """The number of characters at the end that may begin a stop sequence."""
        ends = (text[place:] for place in range(len(text)))
        return next((len(end) for end in ends if any(sequence.startswith(end) for sequence in self._stop)), 0)

    def _is_open(self, token: int) -> bool:
        """Whether the token is no text by itself: a byte, special, or none of the tokenizer's."""
        is_byte = (self._tokenizer.id_to_token(token) or _BYTE).startswith(_BYTE)
        return is_byte or self._shown([token]) != self._marked([token])

    def _shown(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode([token for token in tokens if token not in self._ends], skip_special_tokens=True)

    def _marked(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)
