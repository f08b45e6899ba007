"""What a recording is to be, and whether its outputs could be written.

Must stay light: the command line reads this before anything heavy is imported.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from moeless.errors import ConfigError, os_reason
from moeless.workloads.trace_meta import Unit


@dataclass(frozen=True, kw_only=True)
class RecordConfig:
    """What to record.

    Args:
        prompts: Where prompts come from, as ``read_prompts`` takes it.
        out: The trace; a file that is there is replaced. None: no trace.
        gate_inputs: Directory of the gate inputs. None: they are not recorded.
        layer_inputs: Whether the inputs of decoder layers go there as well.
        max_recorded_tokens: Tokens that the directory may hold; None for no bound.
        max_disk_bytes: Bytes that it may take; None for no bound.
        resume: Continue the directory if it holds a recording.
        limit: Prompts at the most.
        max_tokens: Tokens to generate for each at the most.
        unit: What one entry of the trace is.
        topk_ids: Whether the experts of every token are kept as well.
        raw: Continue prompts as they are, even if the model has a chat template.
        temperature: 0 is greedy.
        seed: Shuffles the prompts and makes sampling repeatable; None keeps the prompts' order.
        licence: What the trace says of its licence; None says what is known of the prompts'.

    Raises:
        ConfigError: A number is out of range, or options contradict each other.
    """

    prompts: str
    out: Path | None = None
    gate_inputs: Path | None = None
    layer_inputs: bool = False
    max_recorded_tokens: int | None = None
    max_disk_bytes: int | None = None
    resume: bool = False
    limit: int | None = None
    max_tokens: int = 128
    unit: Unit = "steps"
    topk_ids: bool = False
    raw: bool = False
    temperature: float = 0.0
    seed: int | None = None
    licence: str | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit is {self.limit}; record at least 1 prompt")
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}; generate at least 1")
        if self.max_recorded_tokens is not None and self.max_recorded_tokens < 1:
            raise ConfigError(
                f"max_recorded_tokens is {self.max_recorded_tokens}; record at least 1"
            )
        if self.out is None and self.gate_inputs is None:
            raise ConfigError("nothing to record; give --out, --gate-inputs or both")
        if self.gate_inputs is None:
            for option, value in (
                ("--layer-inputs", self.layer_inputs),
                ("--max-recorded-tokens", self.max_recorded_tokens),
                ("--max-disk", self.max_disk_bytes),
                ("--resume", self.resume),
            ):
                if value:
                    raise ConfigError(f"{option} is about gate inputs; give --gate-inputs too")
        if self.resume and self.out is not None:
            raise ConfigError(
                "--resume continues gate inputs, but a trace is recorded in one go; leave --out "
                "or --resume out"
            )


def check_outputs(config: RecordConfig) -> None:
    """Refuse outputs that could not be written, before any work is done.

    Raises:
        ConfigError: The trace is a directory, the gate inputs are none, a folder is missing or
            cannot be written, or a directory holds something else, or a recording that is not to
            be continued.
    """
    if config.out is not None:
        check_output(config.out)
    if config.gate_inputs is not None:
        _check_directory(config.gate_inputs, resume=config.resume)


def check_output(path: Path) -> None:
    """Refuse an output file that could not be written, before any work is done.

    Raises:
        ConfigError: It is a directory, or its folder is missing or cannot be written.
    """
    if path.is_dir():
        raise ConfigError(f"--out {path} is a directory; name a file, such as trace.npz")
    if not path.parent.is_dir():
        raise ConfigError(f"--out {path}: there is no directory {path.parent}; create it first")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"--out {path}: {path.parent} cannot be written ({os_reason(error)}); choose "
            "another directory"
        ) from error


def _check_directory(path: Path, *, resume: bool) -> None:
    if path.exists() and not path.is_dir():
        raise ConfigError(f"--gate-inputs {path} is a file; name a directory")
    if not path.exists() and not path.parent.is_dir():
        raise ConfigError(
            f"--gate-inputs {path}: there is no directory {path.parent}; create it first"
        )
    if path.exists():
        if not resume and (path / "manifest.json").exists():
            raise ConfigError(
                f"--gate-inputs {path} holds a recording already; continue it with --resume, or "
                "name another directory"
            )
        others = [each.name for each in path.iterdir() if not each.name.startswith("gates.")]
        if others and not (path / "manifest.json").exists():
            raise ConfigError(
                f"--gate-inputs {path} is not empty ({min(others)}); name another directory"
            )
    folder = path if path.exists() else path.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"--gate-inputs {path}: {folder} cannot be written ({os_reason(error)}); "
            "choose another directory"
        ) from error
