"""Entry point of a worker process; started by the supervisor, not by hand."""

import argparse
import ctypes
import faulthandler
import os
import signal
import socket

from moeless.core.garbage import exempt_what_stays
from moeless.functions.links.pulse import start_beating
from moeless.functions.worker.standby import move_to, stand_by

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run a worker until the supervisor closes the connection."""
    faulthandler.enable()  # should a library crash, stderr says where
    parser = argparse.ArgumentParser(prog="moeless-worker")
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--spin-us", type=int, default=0)
    parser.add_argument(
        "--pulse-fd", type=int, required=True, help="shared memory to show that it lives in"
    )
    parser.add_argument(
        "--cores", type=_parse_cores, default=(), help="comma-separated cores to stay on"
    )
    parser.add_argument("--spare", action="store_true", help="get ready, then wait for a device")
    arguments = parser.parse_args()
    # The supervisor decides when workers end; a terminal's Ctrl-C must not tear them away from
    # requests that are being finished.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setpriority(os.PRIO_PROCESS, 0, 0)  # not the supervisor's
    # A worker that is stopped cannot notice that its supervisor is gone; the kernel can.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    pulse = start_beating(arguments.pulse_fd)
    os.close(arguments.pulse_fd)
    connection = socket.socket(fileno=arguments.socket_fd)
    device, cores = arguments.device, arguments.cores
    if arguments.spare:
        standby = stand_by(connection)
        if standby is None:
            return
        device, cores = standby
    move_to(cores)

    import torch  # after the affinity is in place

    from moeless.functions.compute.background import start_helpers
    from moeless.functions.worker.worker import Worker

    torch.set_num_threads(arguments.threads)
    start_helpers()
    exempt_what_stays()
    Worker(connection, device=device, spin_s=arguments.spin_us * 1e-6, pulse=pulse).run()


def _parse_cores(text: str) -> tuple[int, ...]:
    return tuple(int(core) for core in text.split(",") if core)


if __name__ == "__main__":
    main()
