"""``moeless serve``: an OpenAI-compatible server."""

import logging
import signal
from typing import Any

import click

from moeless.cli.options import engine_config, engine_options, experts_config, experts_options
from moeless.cli.progress import ProgressLines
from moeless.cli.server_options import (
    is_open_to_others,
    ledger_config,
    server_options,
    server_settings,
    trace_config,
)
from moeless.core.signals import TERMINATED
from moeless.telemetry.log_format import configure_logging


@click.command()
@click.argument("model")
@server_options
@engine_options
@experts_options
def serve(model: str, host: str, port: int, **options: Any) -> int:
    """Serve MODEL over HTTP: a directory, a hub id, or "demo".

    \b
    Examples:
      moeless serve demo
      moeless serve ./Mixtral-8x7B-Instruct --devices cuda:0,1 --policy paper
      moeless serve demo --devices cpu:2 --device-memory 200MB --keep-alive 30
      moeless serve ./OLMoE-1B-7B --pool /tmp/moe --memory-share 25%
      moeless serve demo --host 0.0.0.0 --api-key-file keys.txt --key-concurrent 8
    """
    experts = experts_config(options)
    engine = engine_config(model, options)
    trace = trace_config(options)
    ledger = ledger_config(options)
    log_format = options.pop("log_format")
    configure_logging(log_format, options.pop("log_level"))
    settings = server_settings(host, options)
    if is_open_to_others(host, settings):
        click.echo(
            f"moeless: warning: everybody who reaches {host} may use this server: "
            f"set --api-key-file",
            err=True,
        )

    def say(text: str) -> None:
        if log_format == "json":
            logging.getLogger("moeless.serve").info(text)
        else:
            click.echo(f"moeless: {text}", err=True)

    with ProgressLines(say) as lines:
        lines.expect("loading libraries")
        # Everything heavy is imported here, so that --help and wrong options answer at once.
        from moeless.bootstrap.serving.engine import served_model_id
        from moeless.server import ServerAddress
        from moeless.server.launch import ServeConfig, serve_model

        def announce(address: ServerAddress) -> None:
            lines.close()
            name = served_model_id(engine)
            click.echo(f"moeless: serving {name} on {address.url} (Ctrl-C stops)")

        ended_by = serve_model(
            engine,
            experts,
            ServeConfig(host=host, port=port, settings=settings, trace=trace, ledger=ledger),
            on_ready=announce,
            progress=lines.stage,
        )
    return TERMINATED if ended_by == signal.SIGTERM else 0
