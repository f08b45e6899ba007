"""Requests made up from a server's own OpenAPI document, as schemathesis makes them."""

import contextlib
from dataclasses import dataclass, field
from functools import partial

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

HANG_S = 30.0
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@dataclass
class Tally:
    """How often each status came, by operation."""

    statuses: dict[str, dict[int, int]] = field(default_factory=dict)

    def count(self, operation: str, status: int) -> None:
        """Count one answer."""
        found = self.statuses.setdefault(operation, {})
        found[status] = found.get(status, 0) + 1

    @property
    def total(self) -> int:
        """Answers in all."""
        return sum(sum(found.values()) for found in self.statuses.values())


def fuzz(url: str, *, examples: int, number: int, headers: dict[str, str] | None = None) -> Tally:
    """Send ``examples`` valid and as many invalid requests to each operation.

    An answer that the document does not foresee, a 5xx or one that does not come is an error.
    """
    document = httpx.get(f"{url}/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    tally = Tally()
    for result in schema.get_all_operations():
        operation = result.ok()
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            checks = CHECKS + [negative_data_rejection] * (mode is GenerationMode.NEGATIVE)
            strategy = operation.as_strategy(generation_mode=mode)
            send = partial(_send, url=url, headers=headers, checks=checks, tally=tally)
            _try_all(strategy, send, examples, number)
    return tally


def _send(case, *, url, headers, checks, tally):
    response = case.call(base_url=url, headers=headers, timeout=HANG_S)
    tally.count(case.operation.label, response.status_code)
    case.validate_response(response, checks=checks)


def _try_all(strategy, send, examples, number):
    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def try_one(case):
        send(case)

    with contextlib.suppress(Unsatisfiable):  # nothing can be wrong without parameters
        try_one()
