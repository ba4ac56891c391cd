"""Headless Chromium for tests, driven through its debugging pipe: real key strokes, the page's DOM, pictures, PDF."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
KEYS = {"Tab": 9, "Enter": 13, "ArrowRight": 39, "ArrowDown": 40}
"""Virtual key codes, which Chromium needs beside the key's name."""
PATIENCE = 60.0
# Chromium reads commands from file descriptor 3 and answers on 4.
START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)


class Navigated(Exception):
    """The page was replaced while the browser answered."""


class Browser:
    """One page in one browser; `with Browser(folder) as page`."""

    def __init__(self, profile: Path) -> None:
        import fcntl  # not on Windows, where no test opens a browser

        assert CHROMIUM
        ours, theirs = os.pipe(), os.pipe()
        low = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (ours[0], theirs[1])]
        switches = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, *map(str, low), CHROMIUM, *switches, "--remote-debugging-pipe",
             f"--user-data-dir={profile}"],
            pass_fds=low, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for fd in (*low, ours[0], theirs[1]):
            os.close(fd)
        self._to, self._from = ours[1], theirs[0]
        self._buffer, self._number, self._session = b"", 0, None
        self.said: list[str] = []

    def __enter__(self) -> Browser:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Runtime.enable")
        self.call("Log.enable")
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def call(self, method: str, **parameters: Any) -> Any:
        """Sends a command of the DevTools protocol; returns its answer. What the page logs meanwhile goes to `said`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "navigated" in answer.get("error", {}).get("message", ""):
                    raise Navigated(answer)
                assert "error" not in answer, answer
                return answer["result"]
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
                self.said.append(json.dumps(answer["params"]))

    def _read(self) -> Any:
        while b"\0" not in self._buffer:
            part = os.read(self._from, 1 << 20)
            assert part, "the browser ended"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def open(self, page: Path, scheme: str = "light") -> None:
        """Loads a file in the light or dark colour scheme, and waits until it is complete."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.wait(f"document.readyState === 'complete' && location.href === {json.dumps(page.resolve().as_uri())}")

    def reload(self) -> None:
        """Loads the page again, and waits until the new one is complete: the old one answers until it is gone."""
        self.get("window.before = true")
        self.call("Page.reload")
        self.wait("!window.before && document.readyState === 'complete'")

    def get(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Waits until a JavaScript expression is true in the page, or in the one that takes its place meanwhile."""
        end = time.monotonic() + PATIENCE
        while not self._holds(condition):
            assert time.monotonic() < end, condition
            time.sleep(0.05)

    def _holds(self, condition: str) -> bool:
        try:
            return bool(self.get(condition))
        except Navigated:
            return False

    def press(self, key: str) -> None:
        """Presses and releases one key, as on a keyboard."""
        common = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def picture(self, path: Path, width: int = 1100) -> None:
        """The whole page as PNG."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def print(self) -> bytes:
        """The page as PDF."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"])
