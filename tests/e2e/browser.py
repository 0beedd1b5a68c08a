"""A headless chromium, driven through its debugging port."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

from slime_core.waits import poll

START_TIMEOUT_S, TEXT_TIMEOUT_S, CALL_TIMEOUT_S = 180.0, 180.0, 90.0
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--remote-debugging-port=0", "--window-size=1400,900", "--enable-unsafe-swiftshader",
)  # fmt: skip


def program() -> str | None:
    """Path of chromium; None where it is not installed."""
    return shutil.which("chromium")


@dataclass
class Page:
    """One tab."""

    socket: ClientConnection
    numbers: Iterator[int]

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the debugging protocol; returns its result."""
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            answer = json.loads(self.socket.recv(timeout=CALL_TIMEOUT_S))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression on the page."""
        return self.call("Runtime.evaluate", expression=script)["result"].get("value")

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)

    def text(self) -> str:
        """What can be read on the page now."""
        return self.evaluate("document.body ? document.body.innerText : ''") or ""

    def shows(self, *wanted: str) -> str:
        """Waits until all of these stand on the page; returns its text."""

        def look() -> str | None:
            text = self.text()
            return text if all(one in text for one in wanted) else None

        try:
            return poll(f"{wanted} on the page", TEXT_TIMEOUT_S, look, interval_s=0.5)
        except Exception as error:
            where = self.evaluate("location.href")
            raise AssertionError(f"{error}; {where} shows:\n{self.text()[:3000]}") from error

    def click(self, label: str) -> None:
        """Clicks the tab or button with this label, once it is there."""
        script = f"""(() => {{
            const all = [...document.querySelectorAll("button, a, [role=tab], li")];
            const found = all.filter((e) => (e.innerText || "").trim() === {json.dumps(label)});
            if (found.length) found[0].click();
            return found.length;
        }})()"""
        poll(f"a tab {label}", TEXT_TIMEOUT_S, lambda: self.evaluate(script) or None)

    def screenshot(self, path: Path, width: int, height: int) -> None:
        """Writes the upper left part of what is seen as a PNG."""
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 0.75}
        taken = self.call("Page.captureScreenshot", format="png", clip=clip)
        path.write_bytes(base64.b64decode(taken["data"]))


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """A browser with an empty profile and one open tab."""
    found = program()
    assert found is not None
    process = subprocess.Popen(
        [found, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        port_file = profile / "DevToolsActivePort"

        def port() -> str | None:
            assert process.poll() is None, f"chromium ended with status {process.returncode}"
            return (port_file.read_text().split("\n")[0] or None) if port_file.exists() else None

        number = poll("chromium", START_TIMEOUT_S, port)
        blank = urllib.parse.quote("about:blank")
        made = httpx.put(f"http://127.0.0.1:{number}/json/new?{blank}", timeout=CALL_TIMEOUT_S)
        address = made.raise_for_status().json()["webSocketDebuggerUrl"]
        with connect(address, max_size=None, open_timeout=CALL_TIMEOUT_S, proxy=None) as socket:
            yield Page(socket, count(1))
    finally:
        process.terminate()
        process.wait(10)
