"""Serves a fake engine; run as a program by the tests.

Arguments: seconds to drain, and tokens after which streams stop (1 if it is left out).
"""

import sys

from fakes.text_engine import FakeTextEngine
from moeless.server import ServerSettings, create_app, run_server


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


engine = FakeTextEngine()
engine.stall_after = float(sys.argv[2]) if len(sys.argv) > 2 else 1
settings = ServerSettings(drain_s=float(sys.argv[1]))
run_server(
    create_app(engine, settings=settings),
    "127.0.0.1",
    0,
    lambda address: say(address.url),
)
say(f"cancelled {len(engine.cancelled)}")
