"""``moeless generate``: one answer, in this terminal."""

import os
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from moeless.cli.finite_range import FiniteRange
from moeless.cli.options import engine_config, engine_options, experts_config, experts_options
from moeless.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from moeless.core.generation import TextEngine


def _encode(engine: "TextEngine", prompt: str, model: str, *, raw: bool) -> list[int]:
    if raw:
        return engine.encode(prompt)
    try:
        return engine.encode_chat([{"role": "user", "content": prompt}])
    except RequestError as error:
        if error.code != "no_chat_template":
            raise
        raise ConfigError(
            f"{model} has no chat template; add --raw to continue PROMPT as it is"
        ) from error


@click.command()
@click.argument("model")
@click.argument("prompt")
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option(
    "--temperature", type=FiniteRange(0, 5), default=0.0, show_default=True, help="0: greedy."
)
@click.option("--top-p", type=FiniteRange(0, 1, min_open=True), default=1.0)
@click.option("--seed", type=click.IntRange(min=0), help="Makes sampling repeatable.")
@click.option("--raw", is_flag=True, help="Continue PROMPT as it is, without a chat template.")
@engine_options
@experts_options
def generate(model: str, prompt: str, raw: bool, **options: Any) -> None:
    """Answer PROMPT ("-" reads it from standard input) with MODEL, word by word.

    \b
    Examples:
      moeless generate demo "What is the capital of France?"
      moeless generate ./OLMoE-1B-7B "Once upon a time" --raw --devices cpu:1
    """
    prompt = _read(prompt)
    experts = experts_config(options)
    engine = engine_config(model, options)
    from moeless.bootstrap.serving.engine import start_engine
    from moeless.core.generation import GenerationRequest, SamplingParams

    running = start_engine(
        engine, experts, progress=lambda text: click.echo(f"moeless: {text}", err=True)
    )
    try:
        text_engine = running.engine
        ids = _encode(text_engine, prompt, model, raw=raw)
        began_s = time.perf_counter()
        count = 0
        for event in text_engine.submit(
            GenerationRequest(
                request_id="generate",
                prompt_ids=tuple(ids),
                sampling=SamplingParams(
                    max_tokens=options["max_tokens"],
                    temperature=options["temperature"],
                    top_p=options["top_p"],
                    seed=options["seed"],
                ),
            )
        ):
            if event.error:
                raise click.ClickException(event.error)
            click.echo(event.text, nl=False)
            sys.stdout.flush()
            count = event.completion_tokens
        click.echo()
        seconds = time.perf_counter() - began_s
        click.echo(
            f"moeless: {len(ids)} prompt and {count} answer tokens in {seconds:.1f} s", err=True
        )
    finally:
        running.close()


def _read(prompt: str) -> str:
    """The prompt as text; bytes that the locale does not know are taken as UTF-8."""
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            return os.fsencode(text).decode("utf-8")
    except UnicodeError as error:
        raise click.UsageError(
            f"PROMPT is not text in the encoding of this terminal, nor UTF-8: {error}"
        ) from error
    return text
