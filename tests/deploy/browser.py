"""A headless Chromium, driven over a pair of pipes (the DevTools protocol's ``--remote-debugging-pipe``)."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

BOUND = 60.0
"""Seconds after which a wait is a failure."""


def chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page:
    """One tab."""

    def __init__(self, send: int, receive: int) -> None:
        self._send = send
        self._receive = receive
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        """What the browser told without being asked: requests, exceptions, console messages."""

    def open(self, url: str, *, dark: bool = False, size: tuple[int, int] = (1280, 1500)) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=size[0],
            height=size[1],
            deviceScaleFactor=1,
            mobile=False,
        )
        self.call("Page.navigate", url=url)
        self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until the expression is true."""
        deadline = time.monotonic() + BOUND
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, (
                f"never true: {expression}; {self.evaluate('document.body.innerText')}"
            )
            time.sleep(0.1)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") != self._number:
                self.events.append(answer)
                continue
            assert "error" not in answer, answer["error"]
            result: dict[str, Any] = answer["result"]
            return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._receive, 2**16)
            assert part, "the browser is gone"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A browser with an empty profile."""
    executable = chromium()
    assert executable is not None
    to_browser, send = os.pipe()
    receive, from_browser = os.pipe()
    command = [
        executable, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
        "--no-first-run", "--disable-background-networking", f"--user-data-dir={profile}",
    ]  # fmt: skip
    # The browser reads commands from descriptor 3 and answers on descriptor 4.
    shell = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$@"'
    process = subprocess.Popen(
        ["bash", "-c", shell, "chromium", *command],
        pass_fds=(to_browser, from_browser),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Page(send, receive)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
        os.close(send)
        os.close(receive)
