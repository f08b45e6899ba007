"""The packaged conversations and their format."""

import pytest

from moeless.engines.demo.calibration import (
    CALIBRATION_FILE,
    EVALUATION_FILE,
    parse_conversations,
    read_packaged,
)


def test_turns_and_conversations_are_told_apart():
    text = (
        "# a comment\n[system]\nBe brief.\n[user]\nHi\n\nthere\n======\n"
        "[user]\nBye\n[assistant]\nOk\n"
    )
    assert parse_conversations(text) == [
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi\n\nthere"},
        ],
        [{"role": "user", "content": "Bye"}, {"role": "assistant", "content": "Ok"}],
    ]


def test_a_text_without_turns_has_no_conversations():
    assert parse_conversations("nothing here\n=====\n") == []


@pytest.mark.parametrize("name", [CALIBRATION_FILE, EVALUATION_FILE])
def test_packaged_conversations_are_well_formed(name):
    conversations = parse_conversations(read_packaged(name))
    assert len(conversations) > 20
    for turns in conversations:
        roles = [turn["role"] for turn in turns]
        if roles[0] == "system":
            roles = roles[1:]
        assert roles[::2] == ["user"] * len(roles[::2])
        assert roles[1::2] == ["assistant"] * len(roles[1::2])
        assert all(turn["content"] for turn in turns)


def test_evaluation_and_calibration_share_no_turn():
    def turns_of(name):
        return {
            turn["content"] for turns in parse_conversations(read_packaged(name)) for turn in turns
        }

    assert not turns_of(CALIBRATION_FILE) & turns_of(EVALUATION_FILE)


def test_the_packaged_texts_stay_small():
    assert len(read_packaged(CALIBRATION_FILE).encode()) < 300_000
