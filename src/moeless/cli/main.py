"""The command ``moeless``: finds commands, and turns errors into one line and an exit code."""

import gc
import io
import sys
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

import click
from click.exceptions import NoArgsIsHelpError

from moeless import __version__
from moeless.errors import MissingExtraError, MoelessError, find_os_error, is_exhausted, os_reason

ENTRY_POINT_GROUP = "moeless.commands"
"""Installed packages add commands through this entry-point group."""

_COMMANDS = {
    "serve": "moeless.cli.serve:serve",
    "pool": "moeless.cli.pool:pool",
    "usage": "moeless.cli.usage:usage",
    "generate": "moeless.cli.generate:generate",
    "inspect": "moeless.cli.inspect_model:inspect",
    "devices": "moeless.cli.devices:devices",
    "record": "moeless.cli.record:record",
    "predictor": "moeless.cli.predictor:predictor",
    "plan": "moeless.cli.plan:plan",
    "replay": "moeless.cli.replay:replay",
    "demo": "moeless.cli.demo:demo",
    "demo-model": "moeless.cli.demo_model:demo_model",
}

_EXTRAS = {
    "torch": "transformers",
    "transformers": "transformers",
    "safetensors": "transformers",
    "huggingface_hub": "transformers",
    "fastapi": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
    "openai": "demo",
    "gguf": "demo",
    "accelerate": "demo",
    "matplotlib": "replay",
    "pyarrow": "replay",
}


class _LazyGroup(click.Group):
    """Imports a command's module only when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's
        """Names of all commands."""
        return [*_COMMANDS, *sorted(set(self._contributed()) - set(_COMMANDS))]

    def get_command(
        self,
        ctx: click.Context,  # noqa: ARG002 - click's
        cmd_name: str,
    ) -> click.Command | None:
        """The command of a name."""
        if cmd_name in _COMMANDS:
            module, _, attribute = _COMMANDS[cmd_name].partition(":")
            command = getattr(import_module(module), attribute)
        elif cmd_name in (contributed := self._contributed()):
            command = contributed[cmd_name].load()
        else:
            return None
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """All commands with their whole first sentence, where click would cut it off."""
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None:
                rows.append((name, command.get_short_help_str(limit=200)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def _contributed(self) -> dict[str, EntryPoint]:
        return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
)
@click.version_option(__version__, prog_name="moeless")
@click.pass_context
def moeless(context: click.Context) -> None:
    """Serverless expert serving for Mixture-of-Experts language models.

    \b
    Examples:
      moeless demo                            serve the demo model and talk to it
      moeless serve MODEL --devices cpu:2     OpenAI-compatible server on port 8000
      moeless inspect MODEL                   what a model's functions need
      moeless replay --routing FILE.npz       compare balancing policies on a recorded trace
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def run(arguments: list[str]) -> int:
    """Run a command.

    Args:
        arguments: The command line without the program's name.

    Returns:
        0 when done, 2 for bad usage or bad input, 130 when interrupted, 1 for anything else that
        was foreseen. What was not foreseen is raised.
    """
    try:
        result = moeless.main(args=arguments, prog_name="moeless", standalone_mode=False)
    except NoArgsIsHelpError as bare:
        return _fail(_say_what_to_do(bare.ctx), 2)
    except click.UsageError as error:
        where = f" (see {error.ctx.command_path} --help)" if error.ctx is not None else ""
        return _fail(f"{error.format_message()}{where}", 2)
    except click.ClickException as error:
        return _fail(error.format_message(), 2)
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted", 130)
    except MoelessError as error:
        return _fail(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        missing = MissingExtraError(
            f"{error.name} is not installed; run pip install 'moeless[{extra}]'"
        )
        return _fail(str(missing), missing.exit_code)
    except Exception as error:
        told = _tell_surroundings(error)
        if told is None:
            raise
        return _fail(*told)
    return result if isinstance(result, int) else 0


def _tell_surroundings(error: Exception) -> tuple[str, int] | None:
    """What is wrong around the program, wherever it was noticed; None for anything else."""
    refused = find_os_error(error)
    if refused is not None and is_exhausted(refused):
        where = f"{refused.filename}: " if refused.filename else ""
        return f"{where}{os_reason(refused)}", 1
    if isinstance(error, RuntimeError) and "home directory" in str(error):  # as pathlib says it
        return "no home directory is known; set HOME, or MOELESS_CACHE_DIR for what is kept", 2
    return None


def _say_what_to_do(context: click.Context | None) -> str:
    """One line for a group without a command, in place of click's page of help."""
    if context is None or not isinstance(context.command, click.Group):
        return "say what to do (see moeless --help)"
    names = ", ".join(context.command.list_commands(context))
    return f"{context.command_path} needs a command: {names} (see {context.command_path} --help)"


def _fail(message: str, code: int) -> int:
    click.echo(f"moeless: error: {' '.join(message.split())}", err=True)
    return code


def main() -> None:
    """Entry point of the command ``moeless``."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # models answer in more than a locale may know
    code = run(sys.argv[1:])
    gc.freeze()  # the end of a process frees everything at once, and need not look at it first
    sys.exit(code)
