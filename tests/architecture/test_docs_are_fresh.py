"""Generated documentation agrees with what it is generated from."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _generator():
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_metrics_page_lists_the_metrics_that_are_served():
    assert (ROOT / "docs" / "metrics.md").read_text("utf8") == _generator().metrics_page()


def test_the_command_page_shows_the_commands_that_there_are():
    assert (ROOT / "docs" / "cli.md").read_text("utf8") == _generator().cli_page()


def test_every_page_that_the_readme_links_to_exists():
    text = (ROOT / "README.md").read_text("utf8")
    targets = [part.split(")")[0].split("#")[0] for part in text.split("](")[1:]]
    local = [target for target in targets if target and "://" not in target]
    assert local
    assert [target for target in local if not (ROOT / target).exists()] == []
