"""How a supervisor runs its workers."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """One worker process.

    Args:
        torch_device: Where it computes.
        budget_bytes: What its instances may hold.
        threads: Compute threads of its own.
        cores: Cores it stays on; empty leaves it to the system.
        spin_us: How long it looks for the next invocation before sleeping, in microseconds.
    """

    torch_device: str
    budget_bytes: int
    threads: int = 1
    cores: tuple[int, ...] = ()
    spin_us: int = 0


@dataclass(frozen=True, kw_only=True)
class SupervisorConfig:
    """A supervisor.

    Args:
        socket_path: Where engines attach; made with mode 0600. Beside it is the admin socket.
        workers: One per device, of those that are there from the beginning.
        max_devices: Devices that there may be in the end, at least as many.
        keep_alive_s: How long an idle instance stays warm unless the rule knows better.
        keep_alive_rule: A keep-alive rule by name.
        linger_s: How long to stay after the owner has vanished without a word, so that a new
            engine can attach to warm workers; and how long idle instances of a model stay whose
            engines have left.
        stays: Whether to stay without an owner until told to stop, whoever comes and goes.
        restart_backoff_s: Wait before the first restart of a worker; doubles up to 30 s.
        start_timeout_s: How long a worker may take to report ready.
        silence_s: How long a worker may show no sign of life before it is replaced; a tenth of
            that, at least a second, while tokens wait for it, and more where it waits for a core.
        order_timeout_s: How long a worker may take for one order, a load for example, before it is
            replaced.
        spare_workers: Workers that stand by to take the place of lost ones.
        record: Whether to record decisions exactly: each is then made for a position of the engine
            that is looked at once, before it, and reported with it; loads are ordered one by one.
    """

    socket_path: str = ""
    workers: tuple[WorkerConfig, ...]
    max_devices: int = 0
    keep_alive_s: float = 300.0
    keep_alive_rule: str = "fixed"
    linger_s: float = 10.0
    stays: bool = False
    restart_backoff_s: float = 0.2
    start_timeout_s: float = 120.0
    silence_s: float = 10.0
    order_timeout_s: float = 60.0
    spare_workers: int = 0
    record: bool = False

    @property
    def num_slots(self) -> int:
        """Devices that engines know of, there or not."""
        return max(self.max_devices, len(self.workers))
