"""``moeless serve``: an OpenAI-compatible server."""

from typing import Any

import click

from moeless.cli.options import engine_config, engine_options, experts_config, experts_options


@click.command()
@click.argument("model")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Port to listen on; 0 takes a free one.",
)
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    envvar="MOELESS_API_KEY",
    help="Require this bearer key; may be given several times (or MOELESS_API_KEY).",
)
@engine_options
@experts_options
def serve(model: str, host: str, port: int, api_keys: tuple[str, ...], **options: Any) -> None:
    """Serve MODEL over HTTP: a directory, a hub id, or "demo".

    \b
    Examples:
      moeless serve demo
      moeless serve ./Mixtral-8x7B-Instruct --devices cuda:0,1 --policy paper
      moeless serve demo --devices cpu:2 --device-memory 200MB --keep-alive 30
    """
    experts = experts_config(options)
    engine = engine_config(model, options)
    # Everything heavy is imported here, so that --help and wrong options answer at once.
    from moeless.server import ServerAddress, ServerSettings

    settings = ServerSettings(api_keys=api_keys)
    from moeless.bootstrap.engine import served_model_id
    from moeless.server.launch import serve_model

    def announce(address: ServerAddress) -> None:
        click.echo(f"moeless: serving {served_model_id(engine)} on {address.url} (Ctrl-C stops)")

    serve_model(
        engine,
        experts,
        host=host,
        port=port,
        settings=settings,
        on_ready=announce,
        progress=lambda text: click.echo(f"moeless: {text}", err=True),
    )
