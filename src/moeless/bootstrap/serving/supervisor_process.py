"""The supervisor process: its start by an engine, and its main function.

It is started with one inherited socket. Over that it gets its configuration, and it knows by its
closing that the starter is gone.
"""

import argparse
import contextlib
import dataclasses
import logging
import socket
import subprocess
import sys
from pathlib import Path

from moeless.bootstrap.serving.control import build_controller, build_sink
from moeless.bootstrap.serving.precedence import precedence
from moeless.config import PolicyConfig
from moeless.core.clock import SystemClock
from moeless.core.garbage import exempt_what_stays
from moeless.errors import FunctionError, MoelessError
from moeless.functions.links.messages import Message, receive, send
from moeless.functions.planning.load_intake import LoadConsumer
from moeless.functions.platform.model_placement import ModelPlacement
from moeless.functions.supervisor.config import SupervisorConfig, WorkerConfig
from moeless.functions.supervisor.pool_directory import PoolDirectory, private_directory
from moeless.functions.supervisor.supervisor import Supervisor
from moeless.policies.keep_alive import KEEP_ALIVES
from moeless.telemetry.log_format import configure_logging, format_in_use

_STOP_TIMEOUT_S = 3.0


class SupervisorProcess:
    """A running supervisor that this process started and owns.

    Args:
        config: Workers and times; the socket is made in a private directory.
        policy: How loads become replicas.
        events: File to append events to, or None.
    """

    def __init__(
        self, config: SupervisorConfig, *, policy: PolicyConfig, events: Path | None = None
    ) -> None:
        self.directory = private_directory()
        self.socket_path = str(self.directory.engine_socket)
        config = dataclasses.replace(
            config, socket_path=self.socket_path, record=events is not None
        )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._owner = ours
        self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [
                *(sys.executable, "-m", __spec__.name),
                *("--owner-fd", str(theirs.fileno())),
                *("--log-format", format_in_use()),
            ],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        send(
            ours,
            {
                "op": "configure",
                "supervisor": dataclasses.asdict(config),
                "policy": dataclasses.asdict(policy),
                "events": None if events is None else str(events.resolve()),
            },
        )

    def close(self) -> None:
        """End the supervisor and its workers."""
        with contextlib.suppress(OSError):
            send(self._owner, {"op": "stop"})
        try:
            self.process.wait(timeout=_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._owner.close()
        self.directory.remove()


def run(owner: socket.socket) -> None:
    """Be the supervisor.

    Args:
        owner: The inherited socket.

    Raises:
        FunctionError: The configuration did not arrive.
    """
    received = receive(owner)
    if received is None or received[0].get("op") != "configure":
        raise FunctionError("the supervisor got no configuration")
    message = received[0]
    fields = message["supervisor"]
    workers = tuple(
        WorkerConfig(**{**w, "cores": tuple(w["cores"])}) for w in fields.pop("workers")
    )
    config = SupervisorConfig(**fields, workers=workers)
    events = message["events"]
    directory = PoolDirectory(Path(config.socket_path).parent)
    try:
        supervisor = build_supervisor(
            config,
            owner=owner,
            policy=PolicyConfig(**message["policy"]),
            events=None if events is None else Path(events),
        )
        exempt_what_stays()
        with precedence():
            supervisor.run()
    finally:
        directory.remove()  # the owner does, too; this is for an owner that was killed


def build_supervisor(
    config: SupervisorConfig,
    *,
    owner: socket.socket | None,
    policy: PolicyConfig,
    events: Path | None,
) -> Supervisor:
    """A supervisor that has everything but a process.

    Args:
        config: Workers, budgets and times.
        owner: See ``Supervisor``.
        policy: How loads become replicas, for engines that do not say.
        events: File to append events to, or None.

    Raises:
        ConfigError: No keep-alive rule has that name, or the file cannot be written.
    """
    clock = SystemClock()
    sink = build_sink(events, clock)

    def make_controller(model: ModelPlacement, request: Message) -> LoadConsumer:
        wanted = request.get("policy")
        return build_controller(
            policy if wanted is None else PolicyConfig(**wanted),
            model,
            torch_devices=[worker.torch_device for worker in config.workers],
            lookahead=int(request["lookahead"]),
            clock=clock,
            sink=sink,
            record=config.record,
        )

    return Supervisor(
        config,
        owner=owner,
        clock=clock,
        keep_alive=KEEP_ALIVES.create(config.keep_alive_rule, seconds=config.keep_alive_s),
        sink=sink,
        make_controller=make_controller,
    )


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(prog="moeless-supervisor")
    parser.add_argument("--owner-fd", type=int, required=True)
    parser.add_argument("--log-format", default="text")
    arguments = parser.parse_args()
    configure_logging(arguments.log_format)
    try:
        run(socket.socket(fileno=arguments.owner_fd))
    except MoelessError as error:
        logging.getLogger(__name__).error("%s", error)  # noqa: TRY400 - one line, no traceback
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
