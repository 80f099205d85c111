"""A headless Chromium, driven over WebDriver's plain HTTP."""

from __future__ import annotations

import base64
import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

INSTALLED = shutil.which("chromium") and shutil.which("chromedriver")
ENTER, ESCAPE, TAB, SHIFT, DOWN = "\ue007", "\ue00c", "\ue004", "\ue008", "\ue015"


class Browser:
    """One window."""

    def __init__(self, url: str, dark: bool) -> None:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1000,760"]
        options += ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []
        asked = {"goog:chromeOptions": {"args": options, "binary": shutil.which("chromium")},
                 "goog:loggingPrefs": {"browser": "ALL"}}  # fmt: skip
        self._client = httpx.Client(base_url=url, timeout=120)
        made = self._call("POST", "/session", {"capabilities": {"alwaysMatch": asked}})
        self._session = f"/session/{made['sessionId']}"

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        response = self._client.request(method, path, json=body)
        value = response.json()["value"]
        assert response.status_code == 200, value
        return value

    def do(self, path: str, **body: Any) -> Any:
        """POST to the session."""
        return self._call("POST", f"{self._session}/{path}", body)

    def open(self, url: str) -> None:
        """Load a page."""
        self.do("url", url=url)

    def size(self, width: int, height: int) -> None:
        """Make it a screen of this many pixels, a phone's if it is narrow."""
        params = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.do("goog/cdp/execute", cmd="Emulation.setDeviceMetricsOverride", params=params)

    def run(self, script: str, *args: Any) -> Any:
        """What a script returns."""
        return self.do("execute/sync", script=script, args=args)

    def type(self, text: str) -> None:
        """Press keys where the focus is."""
        keys = [{"type": kind, "value": c} for c in text for kind in ("keyDown", "keyUp")]
        self.do("actions", actions=[{"type": "key", "id": "keys", "actions": keys}])

    def chord(self, held: str, key: str) -> None:
        """Press a key while another one is held."""
        keys = [{"type": "keyDown", "value": held}, {"type": "keyDown", "value": key},
                {"type": "keyUp", "value": key}, {"type": "keyUp", "value": held}]  # fmt: skip
        self.do("actions", actions=[{"type": "key", "id": "keys", "actions": keys}])

    def until(self, script: str, seconds: float = 30.0) -> Any:
        """What a script returns as soon as it is true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := self.run(script):
                return found
            time.sleep(0.05)
        raise AssertionError(f"{script} did not come true; the page says: {self.text('body')}")

    def text(self, selector: str) -> str:
        """What stands in an element."""
        return self.run(f"return document.querySelector({selector!r}).innerText")

    def errors(self) -> list[str]:
        """What the browser complained of since it was last asked."""
        found = self.do("se/log", type="browser")
        return [entry["message"] for entry in found if entry["level"] in ("SEVERE", "WARNING")]

    def picture(self, path: Path) -> None:
        """Save what is seen."""
        found = self._call("GET", f"{self._session}/screenshot")
        path.write_bytes(base64.b64decode(found))

    def close(self) -> None:
        """End the window."""
        self._call("DELETE", self._session)
        self._client.close()


@contextlib.contextmanager
def browser(*, dark: bool = False) -> Iterator[Browser]:
    """A window of a browser of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/status").json()["value"]["ready"]:
                    break
            time.sleep(0.1)
        window = Browser(url, dark)
        try:
            yield window
        finally:
            window.close()
    finally:
        process.terminate()
        process.wait()
