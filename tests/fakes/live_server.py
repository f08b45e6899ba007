"""A real HTTP server around the fake engine, in a thread."""

import contextlib
import threading
from collections.abc import Iterator

from effort import PATIENCE_S
from fakes.text_engine import FakeTextEngine
from moeless.server import ServerAddress, ServerSettings, create_app
from moeless.server.run import HttpServer, bind


@contextlib.contextmanager
def serve(engine: FakeTextEngine, *, settings: ServerSettings | None = None, **kwargs) -> Iterator:
    """Yields the server; its ``url`` is where it listens."""
    app = create_app(engine, settings=settings or ServerSettings(), **kwargs)
    listener = bind("127.0.0.1", 0)
    address = ServerAddress(host="127.0.0.1", port=listener.getsockname()[1])
    ready = threading.Event()
    server = HttpServer(app, listener, address, lambda _: ready.set())
    server.url = address.url
    server.address = address
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        assert ready.wait(PATIENCE_S)
        yield server
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
