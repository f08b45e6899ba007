"""Log lines for people and machines, and what may not be in them."""

import contextvars
import io
import json
import logging

import pytest

from moeless.errors import FunctionError
from moeless.telemetry.log_format import (
    JsonFormatter,
    TextFormatter,
    configure_logging,
    format_in_use,
    set_request_id,
    with_fields,
)


@pytest.fixture(params=[TextFormatter, JsonFormatter])
def log(request):
    """A logger and what it has written."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(request.param())
    logger = logging.Logger("moeless.test")  # noqa: LOG001 - of this test alone
    logger.addHandler(handler)
    return logger, written


def in_request(request_id, work):
    def run():
        set_request_id(request_id)
        work()

    contextvars.copy_context().run(run)


def test_a_line_has_its_fields_and_the_id_of_its_request(log):
    logger, written = log
    in_request("r-1", lambda: logger.info("request", extra=with_fields(status=200)))
    logger.info("alone")
    first, second = written.getvalue().splitlines()
    assert "r-1" in first
    assert "r-1" not in second
    if first.startswith("{"):
        line = json.loads(first)
        assert line.pop("time").endswith("Z")
        assert line == {
            "level": "info",
            "logger": "moeless.test",
            "message": "request",
            "request_id": "r-1",
            "status": 200,
        }
    else:
        assert first.endswith("INFO moeless.test: request request_id=r-1 status=200")


def test_a_foreign_exception_is_told_without_its_message(log):
    logger, written = log
    prompt = "a sec" + "ret prompt"
    try:
        try:
            raise ValueError(prompt)
        except ValueError as exc:
            raise KeyError(prompt) from exc
    except KeyError:
        logger.exception("the model failed")
    text = written.getvalue()
    assert prompt not in text
    assert text.index("ValueError") < text.index("KeyError")
    assert "test_log_format.py" in text


def test_an_error_of_ours_is_told_with_its_message(log):
    logger, written = log
    try:
        raise FunctionError("device 1 is gone")
    except FunctionError:
        logger.exception("a load failed")
    assert "FunctionError: device 1 is gone" in written.getvalue()


def test_a_json_line_is_one_line(log):
    logger, written = log
    logger.warning("two\nlines of %s", "text")
    if written.getvalue().startswith("{"):
        assert json.loads(written.getvalue())["message"] == "two\nlines of text"


def test_the_format_of_a_process_can_be_handed_on():
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        configure_logging("json", "info")
        assert format_in_use() == "json"
        configure_logging()
        assert (format_in_use(), root.level) == ("text", logging.WARNING)
    finally:
        root.handlers[:] = before
        root.setLevel(level)
