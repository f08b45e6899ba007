"""A headless Chromium, driven over its own protocol."""

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from effort import PATIENCE_S


def find_chromium() -> str | None:
    """The browser's program, or None if there is none."""
    names = (os.environ.get("MOELESS_CHROMIUM"), "chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if name and (found := shutil.which(name))), None)


class Page:
    """One tab.

    Attributes:
        errors: What its console and its network have complained of.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call the protocol and wait for the answer."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            message = json.loads(self._socket.recv(timeout=PATIENCE_S))
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self._hear(message)
        raise AssertionError(f"{method} was not answered")

    def _hear(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(parameters["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in {"error", "warning"}:
            self.errors.append(json.dumps(parameters["args"])[:500])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in {"error", "warning"}:
            self.errors.append(parameters["entry"]["text"])

    def open(self, url: str) -> None:
        """Go to an address, and wait until it is there."""
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && document.body !== null")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        result = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, script: str) -> Any:
        """Wait until an expression is true; returns its value."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not (value := self.run(script)):
            assert time.monotonic() < deadline_s, f"never true: {script}"
            time.sleep(0.05)
        return value

    def press(self, key: str) -> None:
        """Press and release a key."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        """Be a screen of this size in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )

    def prefer(self, scheme: str) -> None:
        """Prefer ``light`` or ``dark``."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Save what is seen."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def open_page(chromium: str, profile: Path) -> Iterator[Page]:
    """A tab of a browser of its own.

    Args:
        chromium: The program.
        profile: An empty folder for it.
    """
    process = subprocess.Popen(
        [
            chromium,
            "--headless=new",
            "--no-sandbox",  # containers have no user namespaces
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-extensions",
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            "about:blank",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        port_file = profile / "DevToolsActivePort"
        deadline_s = time.monotonic() + PATIENCE_S
        while not (port_file.exists() and port_file.read_text().count("\n")):
            assert process.poll() is None, "the browser has ended"
            assert time.monotonic() < deadline_s, "the browser does not start"
            time.sleep(0.05)
        port, browser_path = port_file.read_text().split("\n")[:2]
        base = f"ws://127.0.0.1:{port}"
        with connect(base + browser_path, max_size=None, proxy=None) as browser:
            browser.send(
                json.dumps(
                    {"id": 1, "method": "Target.createTarget", "params": {"url": "about:blank"}}
                )
            )
            target = json.loads(browser.recv(timeout=PATIENCE_S))["result"]["targetId"]
            address = f"{base}/devtools/page/{target}"
            with connect(address, max_size=None, proxy=None) as socket:
                yield Page(socket)
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
