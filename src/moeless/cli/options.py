"""Options that several commands share."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import click
from click.core import ParameterSource

from moeless.bootstrap.serving.invoker_choice import (
    InvokerChoice,
    choose_invoker,
    count_memory_nodes,
)
from moeless.cli.finite_range import FiniteRange
from moeless.config import EngineConfig, ExpertsConfig, PolicyConfig, parse_memory_factor
from moeless.core.cluster import Device, parse_bytes, parse_devices
from moeless.core.memory_share import NO_SHARE, parse_share
from moeless.errors import ConfigError

_Command = Callable[..., Any]
_MOST_DEVICES = 64
"""Where headroom that nobody has asked for ends."""


def experts_options(command: _Command) -> _Command:
    """Options that say where and how experts run."""
    options = [
        click.option(
            "--devices",
            help="The device pool: cpu:N for N devices that share the cores, cuda:0,1 for GPUs; "
            "default: cpu:1 in the engine's process, with workers one for each memory node and at "
            "least cpu:2.",
        ),
        click.option(
            "--pool",
            type=click.Path(path_type=Path),
            metavar="DIR",
            help="Attach to the pool that moeless pool serve runs in DIR, instead of starting "
            "workers; devices and their memory are that pool's.",
        ),
        click.option(
            "--memory-share",
            metavar="SHARE",
            help="With --pool: memory of each device that the model is guaranteed while it has "
            "requests, such as 25%, 0.25 or 2GB; default: none.",
        ),
        click.option(
            "--policy",
            default="moeless",
            show_default=True,
            help="How replicas are chosen: moeless, paper, static, eplb, swift, or an installed "
            "policy.",
        ),
        click.option(
            "--predictor",
            default="gate",
            show_default=True,
            metavar="NAME|DIR",
            help="How loads are expected: gate (copied gates look ahead), DIR (trained by moeless "
            "predictor train), auto (copied gates that learn from live traffic), previous, ewma, "
            "or off (as previous).",
        ),
        click.option(
            "--distance",
            type=click.IntRange(min=1),
            help="Layers to look ahead; default: those a predictor was trained for, else 1.",
        ),
        click.option(
            "--memory-factor",
            default="auto",
            show_default=True,
            metavar="F|auto",
            help="Replicas a layer may have, in multiples of its experts; auto lets moeless take "
            "as few as keep the time within 2% of the best.",
        ),
        click.option(
            "--cv-threshold",
            type=float,
            default=0.2,
            show_default=True,
            help="Replicas are added until their loads vary less than this (policy paper).",
        ),
        click.option(
            "--cost-model",
            metavar="NAME|FILE",
            help="What experts cost in time, for policies that optimise it: h200, a6000, or a "
            "JSON file as benchmarks/calibrate_workers.py writes it; default: rough figures.",
        ),
        click.option(
            "--device-memory",
            metavar="SIZE",
            help="Memory for experts on each device, such as 512MB; default: what the memory "
            "factor asks for.",
        ),
        click.option(
            "--keep-alive",
            type=float,
            default=300.0,
            show_default=True,
            metavar="SECONDS",
            help="How long an idle expert stays on its device; inf: until its room is needed.",
        ),
        click.option(
            "--keep-alive-rule",
            type=click.Choice(["fixed", "histogram"]),
            default="fixed",
            show_default=True,
            help="histogram: each expert stays for as long as covers 95% of its own pauses, once "
            "there were five; --keep-alive until then.",
        ),
        click.option(
            "--invoker",
            type=click.Choice(["auto", "process", "inline"]),
            default="auto",
            show_default=True,
            help="process: one worker process per device; inline: all devices in the engine's "
            "process, one after another; auto: the faster one. That is inline for one device, and "
            "for cpu:N where all cores share one memory node; process where an option of workers "
            "is given (--max-devices, --spare-workers, --worker-timeout and so on), for several "
            "GPUs, and for cores of several memory nodes.",
        ),
        click.option(
            "--live-speeds/--no-live-speeds",
            default=True,
            show_default=True,
            help="Give a device fewer tokens, and in time fewer experts, while it computes much "
            "slower than the others.",
        ),
    ]
    return _apply(options, worker_options(command))


def worker_options(command: _Command) -> _Command:
    """Options that say how workers run."""
    options = [
        click.option(
            "--max-devices",
            type=click.IntRange(min=1),
            metavar="N",
            help="Devices that there may be after moeless devices add; default: as many again as "
            "--devices, at least two more. A slot that nobody uses costs next to nothing.",
        ),
        click.option(
            "--worker-threads",
            type=click.IntRange(min=1),
            help="Compute threads of each worker; default: the cores divided by the workers.",
        ),
        click.option(
            "--spin-us",
            type=click.IntRange(min=0, max=1_000_000),
            help="Microseconds to look for messages before sleeping; default: by core count.",
        ),
        click.option(
            "--worker-timeout",
            type=FiniteRange(min=1),
            default=10.0,
            show_default=True,
            metavar="SECONDS",
            help="Replace a worker that shows no sign of life for so long; for a tenth of that "
            "while tokens wait for it, for six times as long where it only waits for a core.",
        ),
        click.option(
            "--spare-workers",
            type=click.IntRange(min=0, max=64),
            default=0,
            show_default=True,
            help="Workers that stand by, libraries loaded (about 150 MB each), so that a lost one "
            "is replaced at once.",
        ),
        click.option(
            "--events",
            type=click.Path(dir_okay=False, path_type=Path),
            metavar="FILE",
            help="Append what happens to the experts to FILE, one JSON object a line: plans, "
            "loads, evictions, lost workers.",
        ),
    ]
    return _apply(options, command)


def engine_options(command: _Command) -> _Command:
    """Options of the serving engine."""
    options = [
        click.option("--model-id", help="Serve under this id; default: the directory's name."),
        click.option(
            "--dtype",
            type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
            default="auto",
            show_default=True,
            help="Weights and activations; auto is the checkpoint's own, or float32 where the "
            "processor is slow in that and memory allows it.",
        ),
        click.option(
            "--max-batch-size",
            type=click.IntRange(min=1),
            default=32,
            show_default=True,
            help="Sequences that run at the same time.",
        ),
        click.option(
            "--max-waiting",
            type=click.IntRange(min=0),
            default=256,
            show_default=True,
            help="Requests that may wait beyond those; more are refused (429).",
        ),
        click.option(
            "--max-model-len",
            type=click.IntRange(min=1),
            help="Tokens of prompt and completion; default: the model's own limit.",
        ),
        click.option(
            "--batch-invariant",
            is_flag=True,
            help="Answers do not depend on what else is in the batch, to the bit, in every dtype "
            "(CPUs only). Prompts are then read one by one.",
        ),
        click.option(
            "--chat-template",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            metavar="FILE",
            help="Write conversations as the Jinja template in FILE says; default: the model's "
            "own.",
        ),
        click.option(
            "--threads",
            type=click.IntRange(min=1),
            help="Compute threads of the engine; default: half of the cores beside CPU workers.",
        ),
    ]
    return _apply(options, command)


def experts_config(options: dict[str, Any]) -> ExpertsConfig:
    """Take the experts' options out of a command's options.

    Raises:
        ConfigError: A value is not usable.
    """
    memory, pool, share = (options.pop(n) for n in ("device_memory", "pool", "memory_share"))
    asked_devices = options.pop("devices")
    if pool is not None:
        _check_left_to_pool(pool)
    elif share is not None:
        raise ConfigError(
            "--memory-share is a share of a pool's memory: name the pool with --pool DIR, or "
            "leave it out"
        )
    max_devices = options.pop("max_devices")
    devices, choice = _choose_invoker(options.pop("invoker"), asked_devices, pool)
    if choice.name == "process" and pool is None:
        max_devices = with_headroom(max_devices, len(devices))
    return ExpertsConfig(
        devices=devices,
        max_devices=max_devices,
        pool=pool,
        share=NO_SHARE if share is None else parse_share(share),
        invoker=choice.name,
        invoker_reason=choice.reason,
        policy=PolicyConfig(
            policy=options.pop("policy"),
            predictor=options.pop("predictor"),
            distance=options.pop("distance"),
            memory_factor=parse_memory_factor(options.pop("memory_factor")),
            cv_threshold=options.pop("cv_threshold"),
            cost_model=options.pop("cost_model"),
        ),
        device_memory_bytes=None
        if memory is None
        else parse_bytes(memory, option="--device-memory"),
        keep_alive_s=options.pop("keep_alive"),
        keep_alive_rule=options.pop("keep_alive_rule"),
        live_speeds=options.pop("live_speeds"),
        **worker_fields(options),
    )


def worker_fields(options: dict[str, Any]) -> dict[str, Any]:
    """Take the workers' options out of a command's options, as fields of ``ExpertsConfig``."""
    return {
        "worker_threads": options.pop("worker_threads"),
        "spin_us": options.pop("spin_us"),
        "worker_silence_s": options.pop("worker_timeout"),
        "spare_workers": options.pop("spare_workers"),
        "events": options.pop("events"),
    }


def with_headroom(max_devices: int | None, devices: int) -> int:
    """Devices that there may be in the end, where some have been asked for."""
    if max_devices is not None:
        return max_devices
    return min(devices + max(2, devices), max(devices, _MOST_DEVICES))


_NEED_WORKERS = ("max_devices", "worker_threads", "spin_us", "worker_timeout", "spare_workers")
"""Options that mean nothing where experts run in the engine's process."""


def _choose_invoker(
    asked: Literal["auto", "process", "inline"], devices: str | None, pool: Path | None
) -> tuple[tuple[Device, ...], InvokerChoice]:
    """What ``--devices`` and ``--invoker`` stand for; devices are nothing to a pool.

    Raises:
        ConfigError: The devices cannot be read, or an option of workers was given with ``inline``.
    """
    if pool is not None:
        return (), InvokerChoice(name="process", reason="")
    option, nodes = _first_given(_NEED_WORKERS), count_memory_nodes()
    wanted = None if devices is None else parse_devices(devices)
    if asked == "auto":
        choice = choose_invoker(wanted, memory_nodes=nodes, needs_workers=option)
    else:
        choice = InvokerChoice(name=asked, reason="")
    if asked == "inline" and option is not None:
        raise ConfigError(
            f"{option} is for worker processes, and with --invoker inline there are none: "
            f"leave {option} out"
        )
    if wanted is None:
        wanted = parse_devices("cpu:1" if choice.name == "inline" else f"cpu:{max(2, nodes)}")
    return wanted, choice


_LEFT_TO_POOL = (
    "devices",
    "max_devices",
    "device_memory",
    "invoker",
    "worker_threads",
    "spin_us",
    "worker_timeout",
    "spare_workers",
    "events",
)
"""Options of the workers, which are a pool's own."""


def _check_left_to_pool(pool: Path) -> None:
    """Refuse options that an engine cannot choose for a pool.

    Raises:
        ConfigError: One was given.
    """
    option = _first_given(_LEFT_TO_POOL)
    if option is not None:
        raise ConfigError(
            f"{option} is for workers of the engine's own; those of the pool in {pool} have "
            f"theirs: leave {option} out, or start another pool with it"
        )


def _first_given(names: Sequence[str]) -> str | None:
    """The first of some options that is on the command line, as it is written there."""
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            return "--" + name.replace("_", "-")
    return None


def engine_config(model: str, options: dict[str, Any]) -> EngineConfig:
    """Take the engine's options out of a command's options."""
    names = (
        "model_id",
        "dtype",
        "max_batch_size",
        "max_waiting",
        "max_model_len",
        "batch_invariant",
        "chat_template",
        "threads",
    )
    return EngineConfig(model=model, **{name: options.pop(name) for name in names})


def _apply(options: Sequence[Callable[[_Command], _Command]], command: _Command) -> _Command:
    for option in reversed(options):
        command = option(command)
    return command
