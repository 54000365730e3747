"""Text from tokens: whole characters, and nothing of a stop sequence."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from models.text.stream import TextStream


def byte_tokenizer() -> Tokenizer:
    """One token a byte, so that every character of more than one is cut."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: number for number, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


TOKENIZER = byte_tokenizer()


def pieces(text: str, stop: tuple[str, ...] = ()) -> list[str]:
    """What is given out for each token of `text`, and at the end."""
    stream = TextStream(TOKENIZER, stop)
    return [*(stream.add(token) for token in TOKENIZER.encode(text).ids), stream.end()]


def test_a_character_of_several_tokens_comes_whole_with_its_last_one():
    assert pieces("é🙂") == ["", "é", "", "", "", "🙂", ""]


def test_a_text_that_ends_in_the_middle_of_a_character_ends_as_it_is_decoded():
    stream = TextStream(TOKENIZER)
    tokens = TOKENIZER.encode("a🙂").ids[:-1]
    assert "".join(stream.add(token) for token in tokens) + stream.end() == TOKENIZER.decode(tokens) == "a\ufffd"


def test_special_tokens_are_no_text():
    assert TextStream(TOKENIZER).add(TOKENIZER.token_to_id("<end>")) == ""


def test_what_only_looked_like_a_stop_sequence_is_given_out_and_nothing_after_one():
    assert pieces("aab", ("aaa",)) == ["", "", "aab", ""]
    assert pieces("abcd", ("b",)) == ["a", "", "", "", ""]


def test_an_empty_stop_sequence_is_refused():
    with pytest.raises(ValueError, match="empty"):
        TextStream(TOKENIZER, ("a", ""))


def test_a_space_after_the_prompt_is_kept_where_a_tokenizer_drops_the_first_one():
    tokenizer = Tokenizer(models.BPE(vocab={"▁Hello": 0, "▁world": 1}, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    assert TextStream(tokenizer).add(1) == "world"
    assert TextStream(tokenizer, prompt=[0]).add(1) == " world"


def test_a_prompt_that_ends_in_a_replacement_character_is_not_given_out_again():
    prompt = TOKENIZER.encode("my secret \ufffd").ids
    assert TextStream(TOKENIZER, prompt=prompt).add(TOKENIZER.encode("a").ids[0]) == "a"


def test_bytes_that_make_no_character_are_given_out_as_replacements_and_the_text_goes_on():
    """With a tokenizer like that of Llama 2: unknown characters are tokens such as <0xF0>."""
    vocabulary = {"<unk>": 0, "▁a": 1, "b": 2, **{f"<0x{byte:02X}>": byte + 3 for byte in range(256)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    stream = TextStream(tokenizer, prompt=[vocabulary["<0x0A>"]])
    tokens = [vocabulary[name] for name in ("<0x0A>", "<0xF0>", "b", "▁a", "<0xC3>", "<0xA9>", "b")]
    assert "".join(stream.add(token) for token in tokens).replace("\ufffd", "") == "\nb aéb"


def test_bytes_without_end_that_make_no_character_are_not_held_back():
    stream = TextStream(TOKENIZER)
    broken = TOKENIZER.encode("é").ids[0]
    assert len("".join(stream.add(broken) for _ in range(40))) >= 36


@example(text="\ufffd", stop=[])
@example(text="a\ufffdb", stop=["a\ufffdb", "\ufffd"])
@given(text=st.text(max_size=40), stop=st.lists(st.text(min_size=1, max_size=3), max_size=2))
def test_the_pieces_are_the_text_up_to_the_first_stop_sequence(text, stop):
    # Of two stop sequences the one that is complete first ends the text, which may be the later one to begin.
    complete = min((text.find(sequence) + len(sequence) for sequence in stop if sequence in text), default=None)
    given_out = "".join(pieces(text, tuple(stop)))
    if complete is None:
        assert given_out == text
    else:
        known = text[:complete]
        begins = [place for sequence in stop if (place := known.find(sequence)) >= 0]
        assert given_out == known[: min(begins)]
