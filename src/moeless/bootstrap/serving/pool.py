"""A pool of workers that nobody owns: engines come and go, of one model or of several."""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from moeless.bootstrap.serving.precedence import precedence
from moeless.bootstrap.serving.supervisor_process import build_supervisor
from moeless.bootstrap.serving.worker_fleet import check_devices, worker_configs
from moeless.config import ExpertsConfig, PolicyConfig
from moeless.core.garbage import exempt_what_stays
from moeless.errors import ConfigError
from moeless.functions.supervisor.config import SupervisorConfig
from moeless.functions.supervisor.pool_directory import PoolDirectory, make_directory
from moeless.telemetry.jsonl import JsonlSink


def serve_pool(config: ExpertsConfig, path: Path, *, on_ready: Callable[[], None]) -> int:
    """Serve a pool until SIGTERM or SIGINT; its workers end with it.

    Args:
        config: Devices, their memory, and how workers run.
        path: Directory for the pool's sockets; made with mode 0700 if it is not there.
        on_ready: Called once engines can attach.

    Returns:
        The signal.

    Raises:
        ConfigError: No memory is given, a device is not there, the directory cannot be used, or
            another pool is served in it.
    """
    if config.device_memory_bytes is None:
        raise ConfigError(
            "a pool does not know its models beforehand: say with --device-memory how much "
            "memory of each device their experts may take, for example --device-memory 2GB"
        )
    check_devices(config)
    if config.events is not None:
        JsonlSink(config.events).close()
    budgets = [config.device_memory_bytes] * len(config.devices)
    with _taken(path) as directory:
        supervisor = build_supervisor(
            SupervisorConfig(
                socket_path=str(directory.engine_socket),
                workers=worker_configs(config, budgets),
                max_devices=config.max_devices or len(config.devices),
                linger_s=config.linger_s,
                silence_s=config.worker_silence_s,
                spare_workers=config.spare_workers,
                stays=True,
            ),
            owner=None,
            policy=PolicyConfig(),
            events=config.events,
        )
        exempt_what_stays()
        with precedence():
            supervisor.run(on_listening=on_ready)
        return supervisor.ended_by


@contextmanager
def _taken(path: Path) -> Iterator[PoolDirectory]:
    """A directory that no other pool uses meanwhile, without what a killed one left there."""
    is_new = not path.exists()
    directory = make_directory(path)
    lock = os.open(directory.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{path}: a pool is served there already; choose another directory, or attach to "
                f"it with: moeless serve MODEL --pool {path}"
            ) from None
        for left in (directory.engine_socket, directory.admin_socket):
            left.unlink(missing_ok=True)
        yield directory
        if is_new:
            with contextlib.suppress(OSError):
                directory.path.rmdir()
    finally:
        os.close(lock)
