"""Chromium without a window, driven by its own protocol over a pipe: no package is needed.

Source: https://chromedevtools.github.io/devtools-protocol/, and --remote-debugging-pipe (JSON objects that end in NUL).
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
_CODES = {"Tab": 9, "Enter": 13, " ": 32, "ArrowDown": 40}


class Tab:
    """One page in Chromium, which can be typed into."""

    def __init__(self, reading: BufferedReader, writing: BufferedWriter) -> None:
        self._reading, self._writing = reading, writing
        self._next, self._session, self._rest = 0, None, b""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._next += 1
        asked = {"id": self._next, "method": method, "params": parameters}
        asked |= {} if self._session is None else {"sessionId": self._session}
        self._writing.write(json.dumps(asked).encode() + b"\0")
        self._writing.flush()
        while (answer := self._read()).get("id") != self._next:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = self._reading.read1(1 << 16)
            assert read, "Chromium has ended"
            self._rest += read
        one, _, self._rest = self._rest.partition(b"\0")
        return json.loads(one)

    def evaluate(self, script: str) -> Any:
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def open(self, url: str) -> None:
        """Load a page, and wait until it is there."""
        self.evaluate("window.before = true")
        self.call("Page.navigate", url=url)
        self.wait()

    def wait(self, seconds: float = 60) -> None:
        """Wait until another page than the one before is loaded; a page that leads on at once is none."""
        end = time.monotonic() + seconds
        ready = "!window.before && document.readyState == 'complete' && !location.pathname.endsWith('/open')"
        while not self.evaluate(ready):
            assert time.monotonic() < end, self.evaluate("location.href")
            time.sleep(0.05)

    def show(self, width: int, scheme: str = "light") -> None:
        """Set the width in CSS pixels, and whether colors are light or dark."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def press(self, key: str) -> None:
        """Press and release a key."""
        text = {"Enter": "\r", " ": " "}.get(key, "")
        event = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": _CODES[key]}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def press_enter_and_wait(self) -> None:
        self.evaluate("window.before = true")
        self.press("Enter")
        self.wait()

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def find_focus(self) -> str:
        """Return the id of what has the focus, else its text."""
        return self.evaluate("document.activeElement.id || document.activeElement.innerText")

    def tab_to(self, wanted: str) -> None:
        """Press Tab until an element has the focus."""
        for _ in range(60):
            self.press("Tab")
            if self.find_focus() == wanted:
                return
        raise AssertionError(f"Tab never leads to {wanted!r}")


@contextmanager
def start_chromium(folder: Path) -> Iterator[Tab]:
    """Start Chromium with a profile of its own in a folder."""
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for pipe in (os.pipe(), os.pipe()) for end in pipe]
    theirs, ours, mine, yours = ends
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--remote-debugging-pipe",
        f"--user-data-dir={folder}",
    ]
    # It reads commands at 3 and answers at 4.
    command = ["bash", "-c", f'exec "$0" "$@" 3<&{theirs} 4>&{yours}', str(CHROMIUM), *options]
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(command, pass_fds=(theirs, yours), stdout=log, stderr=log)
    os.close(theirs)
    os.close(yours)
    with os.fdopen(mine, "rb") as reading, os.fdopen(ours, "wb") as writing:
        try:
            yield Tab(reading, writing)
        finally:
            process.kill()
            process.wait()
