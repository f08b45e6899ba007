"""Progress on a pipe: a line at each stage, and another whenever a stage lasts."""

import io

import pytest
from rich.console import Console

from moeless.cli.progress import LINE_EVERY_S, ProgressLines, show_progress


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def said():
    return []


@pytest.fixture
def lines(clock, said):
    return ProgressLines(said.append, clock=clock)


def test_every_stage_is_said_as_it_begins(lines, said):
    lines.stage("loading libraries")
    lines.tell("carving layers", 0, 30)
    assert said == ["loading libraries", "carving layers"]


def test_a_stage_that_lasts_is_said_again_with_its_time(lines, said, clock):
    lines.stage("loading libraries")
    clock.now_s += LINE_EVERY_S / 2
    lines.remind()
    assert said == ["loading libraries"]
    clock.now_s += LINE_EVERY_S / 2
    lines.remind()
    lines.remind()
    assert said == ["loading libraries", "loading libraries, 4 s"]


def test_counting_is_said_seldom_and_at_the_end(lines, said, clock):
    for layer in range(1, 31):
        lines.tell("carving layers", layer, 30)
        clock.now_s += 0.3
    assert said == [
        "carving layers",
        "carving layers 15/30, 4 s",
        "carving layers 29/30, 8 s",
        "carving layers 30/30, 9 s",
    ]


def test_nothing_is_said_of_what_is_done(lines, said, clock):
    lines.tell("writing", 0, 1)
    lines.tell("writing", 1, 1)
    clock.now_s += 60
    lines.remind()
    assert said == ["writing"]


def test_after_the_end_no_thread_says_anything(said):
    with ProgressLines(said.append, every_s=3600) as lines:
        lines.stage("serving")
        thread = lines._thread
    assert not thread.is_alive()
    lines.close()


def test_a_pipe_gets_plain_lines_and_a_terminal_bars():
    pipe, terminal = io.StringIO(), io.StringIO()
    with show_progress(Console(file=pipe), prefix="train: ") as tell:
        tell("[layers] of a model with a name that is longer than many terminals are wide", 1, 2)
    assert pipe.getvalue() == (
        "train: [layers] of a model with a name that is longer than many terminals are wide\n"
    )
    with show_progress(Console(file=terminal, force_terminal=True)) as tell:
        tell("layers", 1, 2)
    assert "━" in terminal.getvalue()
    assert "1/2" in terminal.getvalue()
