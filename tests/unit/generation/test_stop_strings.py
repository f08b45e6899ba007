"""Stop strings: found wherever they fall, never shown, nothing else lost."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from moeless.engines.transformers.generation.stop_strings import StopFilter

letters = st.text(alphabet="abc", max_size=30)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=5)


def run(pieces, stops):
    stop_filter = StopFilter(tuple(stops))
    shown = ""
    for piece in pieces:
        shown += stop_filter.push(piece)
        if stop_filter.stopped:
            return shown, True
    return shown + stop_filter.flush(), False


def first_match(text, stops):
    """Start of the longest match among those that end first; None without a match."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return None


def test_text_passes_at_once_without_stop_strings():
    stop_filter = StopFilter(())
    assert stop_filter.push("hello") == "hello"
    assert stop_filter.flush() == ""


def test_a_stop_string_that_spans_pieces_is_never_shown():
    assert run(["Hello E", "N", "D and more"], ["END"]) == ("Hello ", True)


def test_a_beginning_that_comes_to_nothing_is_shown_later():
    stop_filter = StopFilter(("END",))
    assert stop_filter.push("The EN") == "The "
    assert stop_filter.push("ORMOUS") == "ENORMOUS"
    assert not stop_filter.stopped


def test_held_text_is_shown_when_the_text_ends():
    assert run(["wait EN"], ["END"]) == ("wait EN", False)


def test_only_what_may_be_the_beginning_is_held_back():
    stop_filter = StopFilter(("\n\nUser:",))
    assert stop_filter.push("line\n") == "line"
    assert stop_filter.push("next\n\nUse") == "\nnext"


@given(letters, stop_lists, st.lists(st.integers(0, 30), max_size=6))
def test_the_result_equals_a_search_of_the_whole_text(text, stops, cuts):
    borders = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in pairwise(borders)]
    start = first_match(text, stops)
    expected = (text, False) if start is None else (text[:start], True)
    assert run(pieces, stops) == expected


def test_a_thousand_stop_strings_take_a_bounded_number_of_steps_per_character():
    stops = tuple(f"stop number {index} of many" for index in range(1000))
    stop_filter = StopFilter(stops)
    steps = 0
    automaton = stop_filter._automaton
    plain_get = automaton.step

    def counted(node, character):
        nonlocal steps
        steps += 1
        return plain_get(node, character)

    automaton.step = counted
    try:
        text = "stop number 12 of man, stop number 77 of mice. " * 20
        assert stop_filter.push(text) == text
    finally:
        del automaton.step
    assert steps == len(text)
