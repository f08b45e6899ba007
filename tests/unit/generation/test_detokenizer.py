"""Incremental text equals the text of all tokens, and is never cut inside a character."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import drawn

pytest.importorskip("transformers")
_TESTS = str(Path(__file__).resolve().parents[2])
if _TESTS not in sys.path:
    sys.path.insert(0, _TESTS)

from families import make_tokenizer  # noqa: E402 - the path comes first
from moeless.engines.transformers.generation.detokenizer import (  # noqa: E402
    IncrementalDecoder,
    TextAssembler,
)
from moeless.engines.transformers.generation.text_codec import TextCodec  # noqa: E402

CODEC = TextCodec(make_tokenizer())
token_lists = st.lists(st.integers(0, 313), max_size=120)
texts = st.text(max_size=40)


def stream(decoder, token_ids):
    return [decoder.push(token_id) for token_id in token_ids]


@given(texts)
def test_joined_pieces_of_real_text_are_the_text(text):
    decoder = IncrementalDecoder(CODEC.decode)
    pieces = stream(decoder, CODEC.encode(text))
    assert "".join(pieces) + decoder.flush() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@drawn(300)
@given(token_lists)
def test_joined_pieces_of_any_tokens_are_the_text_of_all_tokens(token_ids):
    decoder = IncrementalDecoder(CODEC.decode)
    pieces = stream(decoder, token_ids)
    assert "".join(pieces) + decoder.flush() == CODEC.decode(token_ids)


def test_a_character_of_several_tokens_comes_whole():
    decoder = IncrementalDecoder(CODEC.decode)
    token_ids = CODEC.encode("a字b")
    assert len(token_ids) == 5
    assert stream(decoder, token_ids) == ["a", "", "", "字", "b"]


def test_an_unfinished_character_at_the_end_is_shown_as_replacement():
    decoder = IncrementalDecoder(CODEC.decode)
    stream(decoder, CODEC.encode("a字")[:-1])
    assert decoder.flush() == "\ufffd"


def test_endless_bytes_that_are_no_text_do_not_make_the_window_grow():
    sizes = []

    def decode(token_ids):
        sizes.append(len(token_ids))
        return CODEC.decode(token_ids)

    (lone_byte,) = set(CODEC.encode("ÿ")) - set(CODEC.encode("Ā")) - {CODEC.encode("ÿ")[0]}
    decoder = IncrementalDecoder(decode)
    pieces = stream(decoder, [lone_byte] * 500)
    assert "".join(pieces) + decoder.flush() == CODEC.decode([lone_byte] * 500)
    assert max(sizes) < 40


def test_special_tokens_add_no_text():
    decoder = IncrementalDecoder(CODEC.decode)
    assert stream(decoder, [1, *CODEC.encode("hi"), 2, 0]) == ["", "h", "i", "", ""]


def test_a_leading_space_that_decoding_strips_is_not_lost_later():
    words = ["▁Hello", "▁big", "▁wide", "▁world"]

    def decode(token_ids):  # as sentencepiece does: the first token loses its space
        return "".join(words[token_id % 4] for token_id in token_ids).replace("▁", " ")[1:]

    decoder = IncrementalDecoder(decode)
    token_ids = list(range(60))
    pieces = stream(decoder, token_ids)
    assert "".join(pieces) == decode(token_ids)
    assert pieces[:3] == ["Hello", " big", " wide"]


@given(token_lists, st.lists(st.text(min_size=1, max_size=3), max_size=4))
def test_text_up_to_the_stop_string_is_the_text_of_all_tokens_up_to_it(token_ids, stops):
    assembler = TextAssembler(CODEC.decode, tuple(stops))
    shown = ""
    for token_id in token_ids:
        shown += assembler.push(token_id)
        if assembler.stopped:
            break
    shown += assembler.finish()
    whole = CODEC.decode(token_ids)
    assert whole.startswith(shown)
    assert not any(stop in shown for stop in stops)
    if not assembler.stopped:
        assert shown == whole
        assert not any(stop in whole for stop in stops)
