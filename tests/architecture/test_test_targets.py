"""``make test`` and ``make test-rest`` leave no test out between them, and CI runs both."""

import itertools
import os
import re
from pathlib import Path

import pytest

import effort

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text("utf8")
MARKS = ("slow", "hypothesis", "gpu", "timeout")


def rule(target: str) -> str:
    found = re.search(rf"^{target}:.*\n(?:\t.*\n)*", MAKEFILE, flags=re.MULTILINE)
    assert found, f"the Makefile has no target {target}"
    return found[0]


def choice(target: str) -> str:
    """By which marks a target chooses tests."""
    (chosen,) = re.findall(r'\$\(PYTEST\) -m "([^"]+)"$', rule(target), flags=re.MULTILINE)
    return chosen


def takes(expression: str, marks: set[str]) -> bool:
    words = {word: word in marks for word in re.findall(r"\w+", expression)}
    return bool(eval(expression, {"__builtins__": {}}, words))


def test_every_test_is_in_one_of_the_two():
    for size in range(len(MARKS) + 1):
        for marks in map(set, itertools.combinations(MARKS, size)):
            taken = [name for name in ("test", "test-rest") if takes(choice(name), marks)]
            assert taken, f"nobody runs tests that are marked {sorted(marks)}"


def test_only_tests_of_hypothesis_are_in_both_and_they_draw_more_the_second_time():
    assert takes(choice("test"), {"hypothesis"})
    assert takes(choice("test-rest"), {"hypothesis"})
    assert not takes(choice("test-rest"), set())
    assert not takes(choice("test"), {"slow"})
    assert "MOELESS_TESTS=all" in rule("test-rest")
    assert "MOELESS_TESTS" not in rule("test")
    assert os.environ.get("MOELESS_TESTS", "all") == "all"
    assert effort.count_examples(100) == (100 if effort.THOROUGH else 25)


@pytest.mark.parametrize("target", ["test", "test-rest"])
def test_ci_and_test_all_run_both(target):
    assert f"\nmake {target}\n" in (ROOT / ".ci" / "run").read_text("utf8")
    assert target in rule("test-all").split("##")[0].split()


def test_no_folder_is_left_out():
    (paths,) = re.findall(r"^PYTEST = .* -m pytest (\S+)", MAKEFILE, flags=re.MULTILINE)
    assert paths == "tests"
