"""What holds for all tests: how hypothesis draws, how long clients wait, who hears Ctrl-C."""

import signal
import sys
import threading
from pathlib import Path

_TESTS = str(Path(__file__).resolve().parent)
if _TESTS not in sys.path:
    sys.path.insert(0, _TESTS)

import httpx  # noqa: E402 - the path to shared modules comes first
from hypothesis import HealthCheck, settings  # noqa: E402

from effort import PATIENCE_S, count_examples  # noqa: E402

settings.register_profile(
    "moeless",
    deadline=None,  # how long an example takes says how busy the machine is
    suppress_health_check=[HealthCheck.too_slow],  # so does how long it takes to draw one
    max_examples=count_examples(100),
    print_blob=True,
)
settings.load_profile("moeless")

# A shell that runs tests in the background has them ignore SIGINT, and all that they start.
_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
if _ignored and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A client that is not told how long to wait would give up after five seconds: no setting of httpx.
for _step in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _step, PATIENCE_S)
