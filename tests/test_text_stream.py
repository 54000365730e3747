"""Text from tokens: whole characters, and nothing of a stop sequence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, StopStringCriteria

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
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
DECODERS = {
    "Llama 2": decoders.Sequence(LLAMA),
    "Gemma": decoders.Sequence(LLAMA[:3]),
    "Metaspace": decoders.Metaspace(),
    "Metaspace, first": decoders.Metaspace(prepend_scheme="first"),
    "Metaspace, never": decoders.Metaspace(prepend_scheme="never"),
    "WordPiece": decoders.WordPiece(),
    "WordPiece, no cleanup": decoders.WordPiece(cleanup=False),
    "ByteLevel": decoders.ByteLevel(),
    "BPE": decoders.BPEDecoder(),
    "CTC": decoders.CTC(),
    "bytes, then words": decoders.Sequence([decoders.ByteFallback(), decoders.WordPiece()]),
    "CTC, then spaces": decoders.Sequence([decoders.CTC(), decoders.Metaspace()]),
    "none": None,
}
BYTES = [f"<0x{byte:02X}>" for byte in (0x0A, 0x20, 0x41, 0x82, 0x99, 0x9F, 0xA9, 0xC3, 0xE2, 0xF0)]
# The names of tokens in several kinds of vocabularies. The last line of ByteLevel's has the bytes of é and 🙂.
NAMES = [
    *("a", "ab", "▁let", "▁", "▁▁", "##ing", "##", "up</w>", "</w>", "b</w>c", "|", "<pad>", ".", " .", "'s", "é", " "),
    *("\ufffd", "Ġlook", "Ġ", "Ã", "©", "ð", "Ł", "Ļ", "Ĥ"),
    *BYTES,
]
SPECIAL = ["<unk>", "</s>", "[TOOL]"]
TOKENS = st.lists(st.integers(0, len(NAMES) + len(SPECIAL) + 3), max_size=40)


def tokenizer_of(kind: str) -> Tokenizer:
    """With special tokens, and two that are added but not special."""
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(NAMES)}, []))
    if DECODERS[kind]:
        tokenizer.decoder = DECODERS[kind]
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("▁no")])
    return tokenizer


def numbers(tokenizer: Tokenizer, *names: str) -> list[int]:
    return [tokenizer.token_to_id(name) for name in names]


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
    assert pieces("a<end>bcd", ("a<end>b",)) == ["", "", "", "", "", ""]
    assert pieces("a<end>bcd", ("a<end>c",)) == ["", "", "ab", "c", "d", ""]
    assert pieces("a<end>bcd", ("<end>",)) == ["a", "", "", "", "", ""]


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


@pytest.mark.parametrize("kind", DECODERS)
@given(prompt=TOKENS, tokens=TOKENS)
def test_the_pieces_are_the_decoded_whole_whatever_the_decoder_and_wherever_special_tokens_are(kind, prompt, tokens):
    """Numbers of no token are among them, and bytes that are no character. A prompt ends as a word does."""
    tokenizer = tokenizer_of(kind)
    word = numbers(tokenizer, "a")
    for before in ([], [*prompt, *word]):
        stream = TextStream(tokenizer, prompt=before)
        known = tokenizer.decode(before, skip_special_tokens=True)
        given_out = "".join(map(stream.add, tokens)) + stream.end()
        assert known + given_out == tokenizer.decode([*before, *tokens], skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["Llama 2", "Metaspace", "WordPiece", "ByteLevel", "none"])
@given(data=st.data())
def test_a_stop_sequence_with_special_tokens_in_it_ends_the_text_where_generate_ends(kind, data):
    tokenizer = tokenizer_of(kind)
    tokenizer.add_tokens(["abcdef", kind])  # transformers decodes each token after this text, once for a vocabulary
    prompt = numbers(tokenizer, "é")
    words = numbers(tokenizer, "ab", "▁let", ".", "▁no", *SPECIAL)
    tokens = data.draw(st.lists(st.sampled_from(words), min_size=1, max_size=20))
    marked = tokenizer.decode([*prompt, *tokens], skip_special_tokens=False)[1:]
    begin = data.draw(st.integers(0, len(marked) - 1))
    stop = marked[begin : begin + data.draw(st.integers(1, 12))]
    criterion = StopStringCriteria(PreTrainedTokenizerFast(tokenizer_object=tokenizer), [stop])
    ends = (number for number in range(1, len(tokens) + 1) if criterion(torch.tensor([prompt + tokens[:number]]), None))
    stream = TextStream(tokenizer, (stop,), prompt)
    found = [
        number for number, token in enumerate(tokens, 1) if not stream.has_stopped and stream.add(token) is not None
    ]
    assert stream.has_stopped
    assert found[-1] == next(ends)


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
