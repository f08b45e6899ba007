"""Options of the HTTP server: keys, limits, what is logged."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moeless.cli.finite_range import FiniteRange
from moeless.core.cluster import parse_bytes
from moeless.telemetry.ledger import LedgerConfig
from moeless.telemetry.ledger.file import open_ledger
from moeless.telemetry.tracing import TraceConfig

if TYPE_CHECKING:
    from moeless.server import ServerSettings

_Command = Callable[..., Any]

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


def server_options(command: _Command) -> _Command:
    """Options that say who may send how much."""
    options = [
        click.option(
            "--host",
            default="127.0.0.1",
            show_default=True,
            help="Address to listen on; only this machine reaches the default.",
        ),
        click.option(
            "--port",
            type=click.IntRange(0, 65535),
            default=8000,
            show_default=True,
            help="Port to listen on; 0 takes a free one.",
        ),
        click.option(
            "--api-key",
            "api_keys",
            multiple=True,
            envvar="MOELESS_API_KEY",
            help="Require this bearer key; may be given several times (or MOELESS_API_KEY). Other "
            "users of the machine can read a command line: prefer --api-key-file.",
        ),
        click.option(
            "--api-key-file",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            metavar="FILE",
            help="Require one of the keys in FILE (mode 0600), a name:key a line.",
        ),
        click.option(
            "--allow-origin",
            "allow_origins",
            multiple=True,
            metavar="ORIGIN",
            help="Let web pages of this site, such as https://chat.example, send requests; may be "
            "given several times. Pages of other sites are refused.",
        ),
        click.option(
            "--key-requests-per-minute",
            type=click.IntRange(min=1),
            metavar="N",
            help="Generation requests of each key; default: any number.",
        ),
        click.option(
            "--key-tokens-per-minute",
            type=click.IntRange(min=1),
            metavar="N",
            help="Prompt and generated tokens of each key; default: any number.",
        ),
        click.option(
            "--key-concurrent",
            type=click.IntRange(min=1),
            metavar="N",
            help="Requests of each key at the same time; default: any number.",
        ),
        click.option(
            "--generation-config/--no-generation-config",
            default=True,
            show_default=True,
            help="Take temperature, top_p and top_k from the model's generation_config.json where "
            "a request does not have them; otherwise OpenAI's defaults.",
        ),
        click.option(
            "--request-timeout",
            type=FiniteRange(min=0, min_open=True),
            default=600.0,
            show_default=True,
            metavar="SECONDS",
            help="Longest time for one answer.",
        ),
        click.option(
            "--max-body-size",
            default="4MiB",
            show_default=True,
            metavar="SIZE",
            help="Longest body of a request.",
        ),
        click.option(
            "--max-connections",
            type=click.IntRange(min=1),
            default=2048,
            show_default=True,
            help="Open connections; beyond it those that are idle longest are closed.",
        ),
        click.option(
            "--log-format",
            type=click.Choice(["text", "json"]),
            default="text",
            show_default=True,
            help="How lines on stderr look; json is one object a line.",
        ),
        click.option(
            "--log-level",
            type=click.Choice(["debug", "info", "warning", "error"]),
            default="warning",
            show_default=True,
            help="The least important lines that are written; info has one for each request.",
        ),
        click.option(
            "--trace-endpoint",
            metavar="URL",
            help="Send OpenTelemetry traces to this OTLP/HTTP collector, such as "
            "http://127.0.0.1:4318; needs pip install 'moeless[otel]'.",
        ),
        click.option(
            "--trace-sample",
            type=FiniteRange(0, 1),
            default=0.05,
            show_default=True,
            metavar="SHARE",
            help="Share of requests that are traced, unless their traceparent decides.",
        ),
        click.option(
            "--ledger",
            type=click.Path(dir_okay=False, path_type=Path),
            metavar="FILE",
            help="Write usage of each key, model and function to FILE (SQLite) every second; "
            "moeless usage reads it.",
        ),
        click.option(
            "--ledger-days",
            type=click.IntRange(min=1),
            default=400,
            show_default=True,
            help="How long the ledger keeps usage.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def ledger_config(options: dict[str, Any]) -> LedgerConfig | None:
    """Take the ledger's options out of a command's options.

    Raises:
        ConfigError: The file cannot be used.
    """
    path, days = options.pop("ledger"), options.pop("ledger_days")
    if path is None:
        return None
    open_ledger(path, create=True).close()  # what is wrong is said before the model is loaded
    return LedgerConfig(path=path, keep_days=days)


def trace_config(options: dict[str, Any]) -> TraceConfig | None:
    """Take the options of traces out of a command's options.

    Raises:
        ConfigError: The address cannot be one.
    """
    endpoint, sample = options.pop("trace_endpoint"), options.pop("trace_sample")
    return None if endpoint is None else TraceConfig(endpoint=endpoint, sample=sample)


def server_settings(host: str, options: dict[str, Any]) -> "ServerSettings":
    """Take the limits and keys of a server on ``host`` out of a command's options.

    Raises:
        ConfigError: A value is not usable.
    """
    from moeless.server import ApiKey, KeyLimits, ServerSettings, read_key_file

    names = ("requests_per_minute", "tokens_per_minute", "concurrent")
    limits = KeyLimits(**{name: options.pop(f"key_{name}") for name in names})
    keys = tuple(
        ApiKey(name=f"key-{number}", secret=secret)
        for number, secret in enumerate(options.pop("api_keys"), start=1)
    )
    file: Path | None = options.pop("api_key_file")
    if file is not None:
        keys += read_key_file(file)
    return ServerSettings(
        api_keys=keys,
        key_limits=limits,
        allow_origins=options.pop("allow_origins"),
        local_names_only=not keys and host in _LOOPBACK,
        advised_sampling=options.pop("generation_config"),
        request_timeout_s=options.pop("request_timeout"),
        max_body_bytes=parse_bytes(options.pop("max_body_size"), option="--max-body-size"),
        max_connections=options.pop("max_connections"),
    )


def is_open_to_others(host: str, settings: "ServerSettings") -> bool:
    """Whether other machines can use the server without a key."""
    return host not in _LOOPBACK and not settings.api_keys
