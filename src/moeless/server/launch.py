"""Puts the HTTP server in front of a running engine; the only module here that knows bootstrap."""

import signal
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest

from moeless.bootstrap.serving.engine import Progress, RunningEngine, start_engine
from moeless.config import EngineConfig, ExpertsConfig
from moeless.core.garbage import exempt_what_stays
from moeless.errors import MoelessError
from moeless.server.app import create_app
from moeless.server.run import ServerAddress, bind, run_server
from moeless.server.settings import ServerSettings
from moeless.server.state import ServerState
from moeless.telemetry.engine_metrics import EngineMetrics
from moeless.telemetry.ledger import LedgerConfig, LedgerWriter
from moeless.telemetry.metrics import register_runtime
from moeless.telemetry.snapshot import RuntimeSnapshot
from moeless.telemetry.tracing import TraceConfig, Tracing


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """The server around the engine.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        settings: Limits and keys.
        trace: What is traced, or None for nothing.
        ledger: Where usage is written down, or None.
    """

    host: str
    port: int
    settings: ServerSettings
    trace: TraceConfig | None = None
    ledger: LedgerConfig | None = None


def serve_model(
    engine: EngineConfig,
    experts: ExpertsConfig,
    config: ServeConfig,
    *,
    on_ready: Callable[[ServerAddress], None],
    progress: Progress,
) -> int:
    """Serve until SIGTERM or SIGINT, then stop everything that was started.

    While the model loads it is the caller who must see to it that a signal unwinds.

    Args:
        engine: The model and its limits.
        experts: Where experts run.
        config: The server.
        on_ready: Told the real address once the server can answer.
        progress: Told what happens until then.

    Returns:
        The signal that has ended it.

    Raises:
        MoelessError: Something is wrong with the model, the options or the machine.
    """
    running: RunningEngine | None = None
    tracing: Tracing | None = None
    writer: LedgerWriter | None = None
    registry = CollectorRegistry()
    try:
        bind(config.host, config.port).close()  # a port in use is told before a model is loaded
        tracing = None if config.trace is None else Tracing(config.trace)
        running = start_engine(
            engine, experts, progress=progress, metrics=EngineMetrics(registry), tracing=tracing
        )
        take_snapshot = _snapshot_of(running)
        register_runtime(registry, take_snapshot)
        app = create_app(
            running.engine,
            settings=config.settings,
            metrics_text=lambda: generate_latest(registry),
            experts_snapshot=lambda: running.experts.snapshot().to_dict(),
            live=running.experts.snapshot,
            ready=running.experts.is_alive,
            tracing=tracing,
        )
        if config.ledger is not None:
            state: ServerState = app.state.moeless
            writer = LedgerWriter(
                config.ledger,
                model=running.engine.model_id,
                take_keys=lambda: {name: each.counts() for name, each in state.accounts.items()},
                take_snapshot=take_snapshot,
                on_lost=state.metrics.ledger_lost_minutes.inc,
            )
            writer.start()
        exempt_what_stays()
        return run_server(app, config.host, config.port, on_ready)
    finally:
        # Closing takes a second at most.
        previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if writer is not None:
            writer.close()
        if running is not None:
            running.close()
        if tracing is not None:
            tracing.close()
        signal.signal(signal.SIGTERM, previous)


def _snapshot_of(running: RunningEngine) -> Callable[[], RuntimeSnapshot | None]:
    def take_snapshot() -> RuntimeSnapshot | None:
        try:
            return running.experts.snapshot()
        except MoelessError:
            return None  # a scrape must not fail because the platform is restarting

    return take_snapshot
