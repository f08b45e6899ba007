"""Traces: from an HTTP request to the engine's phases, steps, layers and invocations.

OpenTelemetry is optional and imported when a tracer is made; whoever may be traced holds None
otherwise and does nothing. Phases are written down when a request ends, from times that were
taken anyway; steps, layers and invocations only of every n-th step of a traced request.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moeless import __version__
from moeless.errors import ConfigError, MissingExtraError

# A collector that does not answer must not hold up the end of the server.
_EXPORT_TIMEOUT_S = 2

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span, Tracer


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """What is traced.

    Args:
        endpoint: Base address of an OTLP/HTTP collector, such as http://127.0.0.1:4318.
        sample: Share of requests, unless a request's ``traceparent`` has decided.
        every_steps: Of a traced request, one in so many engine steps is shown with its layers.

    Raises:
        ConfigError: A number is out of range.
    """

    endpoint: str
    sample: float = 0.05
    every_steps: int = 32

    def __post_init__(self) -> None:
        if not self.endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"trace endpoint {self.endpoint!r} is not an address; use http://HOST:4318"
            )
        if not 0 <= self.sample <= 1:
            raise ConfigError(f"trace sample is {self.sample}; use a share from 0 to 1")
        if self.every_steps < 1:
            raise ConfigError(f"trace step interval is {self.every_steps}; use 1 or more")


class RequestTrace:
    """The trace of one sampled request. Used from the event loop, except for ``span``.

    Args:
        tracing: Owner.
        span: The request's own span.
    """

    def __init__(self, tracing: "Tracing", span: "Span") -> None:
        self.span = span
        self._tracing = tracing
        self._sequences: list[str] = []

    def follow(self, request_id: str) -> None:
        """The engine runs a sequence under this id for the request."""
        self._sequences.append(request_id)
        self._tracing.live[request_id] = LiveSequence(trace=self, submitted_ns=time.time_ns())

    def first_token(self, request_id: str) -> None:
        """A sequence has its first token."""
        self._tracing.live[request_id].first_token_ns = time.time_ns()

    def end_sequence(self, request_id: str, *, tokens: int) -> None:
        """A sequence has ended: write its phases down."""
        sequence = self._tracing.live.pop(request_id, None)
        if sequence is not None:
            sequence.write_phases(self._tracing.tracer, self.span, tokens)

    def end(self, *, status: int, fields: Mapping[str, Any]) -> None:
        """The request has its answer."""
        from opentelemetry.trace import Status, StatusCode

        for request_id in self._sequences:
            self.end_sequence(request_id, tokens=0)
        self.span.set_attribute("http.response.status_code", status)
        for name, value in fields.items():
            if value is not None and name not in {"method", "path", "status"}:
                self.span.set_attribute(f"moeless.{name}", value)
        if status >= 500:
            self.span.set_status(Status(StatusCode.ERROR))
        self.span.end()


@dataclass(kw_only=True)
class LiveSequence:
    """Times of a sequence in the engine, Unix nanoseconds."""

    trace: RequestTrace
    submitted_ns: int
    started_ns: int = 0
    first_token_ns: int = 0

    def write_phases(self, tracer: "Tracer", parent: "Span", tokens: int) -> None:
        """Make a span of each phase that the sequence has been in."""
        from opentelemetry.trace import set_span_in_context

        now_ns = time.time_ns()
        started_ns = self.started_ns or self.first_token_ns or now_ns
        phases = [("queue", self.submitted_ns, started_ns)]
        if started_ns < now_ns:
            phases.append(("prefill", started_ns, self.first_token_ns or now_ns))
        if self.first_token_ns:
            phases.append(("decode", self.first_token_ns, now_ns))
        context = set_span_in_context(parent)
        for name, begin_ns, end_ns in phases:
            span = tracer.start_span(f"engine {name}", context=context, start_time=begin_ns)
            if name == "decode":
                span.set_attribute("moeless.tokens", tokens)
            span.end(end_time=end_ns)


class Tracing:
    """Makes spans and sends them off.

    Args:
        config: What is traced.
        processor: Takes ended spans; None sends them to ``config.endpoint`` in batches, from a
            thread of its own.

    Raises:
        MissingExtraError: OpenTelemetry is not installed.
    """

    def __init__(self, config: TraceConfig, processor: "SpanProcessor | None" = None) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

            processor = processor or _batches_to(config.endpoint)
        except ModuleNotFoundError as exc:
            if not (exc.name or "").startswith("opentelemetry"):
                raise
            raise MissingExtraError(
                f"traces need {exc.name}: run pip install 'moeless[otel]'"
            ) from exc
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "moeless", "service.version": __version__}),
            sampler=ParentBasedTraceIdRatio(config.sample),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor)
        self.config = config
        self.tracer = self._provider.get_tracer("moeless", __version__)
        self.live: dict[str, LiveSequence] = {}

    def begin_request(
        self, method: str, path: str, headers: Sequence[tuple[bytes, bytes]]
    ) -> RequestTrace | None:
        """The trace of a request, or None if it is not sampled.

        Args:
            method: HTTP method.
            path: Label of the endpoint, of few values.
            headers: May hold a ``traceparent`` of the caller.
        """
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in headers
            if name in {b"traceparent", b"tracestate"}
        }
        context = TraceContextTextMapPropagator().extract(carrier) if carrier else None
        attributes = {"http.request.method": method, "http.route": path}
        span = self.tracer.start_span(
            f"{method} {path}", context=context, kind=SpanKind.SERVER, attributes=attributes
        )
        return RequestTrace(self, span) if span.is_recording() else None

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def _batches_to(endpoint: str) -> "SpanProcessor":
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = OTLPSpanExporter(
        endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=_EXPORT_TIMEOUT_S
    )
    return BatchSpanProcessor(exporter, export_timeout_millis=1000 * _EXPORT_TIMEOUT_S)
