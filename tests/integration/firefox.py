"""A headless Firefox, driven by its own WebDriver BiDi server: no driver, no patched build.

Nothing but loopback can be reached from it. Source: https://w3c.github.io/webdriver-bidi
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from tests.polling import poll

PROGRAM = shutil.which("firefox-esr") or shutil.which("firefox")
ENTER = "\ue007"
_ANSWER_S = 60.0
#: It looks for an icon before the page's script has named one, and the page forbids that.
_NO_ICON = "/favicon.ico because it violates the following directive"
_PREFERENCES: Mapping[str, Any] = {
    # whatever it wants from elsewhere goes to a port where nobody listens
    "network.proxy.type": 1,
    "network.proxy.http": "127.0.0.1",
    "network.proxy.http_port": 9,
    "network.proxy.ssl": "127.0.0.1",
    "network.proxy.ssl_port": 9,
    "network.proxy.allow_hijacking_localhost": False,
    "app.update.enabled": False,
    "browser.safebrowsing.malware.enabled": False,
    "browser.safebrowsing.phishing.enabled": False,
    "datareporting.policy.dataSubmissionEnabled": False,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
    "remote.active-protocols": 1,
}


class Firefox:
    """One page of a Firefox. `errors` are what the page has logged as errors."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self.errors: list[str] = []
        self.send("session.new", capabilities={})
        self.send("session.subscribe", events=["log.entryAdded"])
        tree = self.send("browsingContext.getTree")
        self._context = tree["contexts"][0]["context"]

    @classmethod
    @contextlib.contextmanager
    def started(cls, folder: Path, *, dark: bool) -> Iterator[Firefox]:
        """Start one with a profile of its own in `folder`, and end it."""
        assert PROGRAM is not None
        scheme = {"layout.css.prefers-color-scheme.content-override": 0 if dark else 1}
        lines = (
            f"user_pref({json.dumps(name)}, {json.dumps(value)});"
            for name, value in {**_PREFERENCES, **scheme}.items()
        )
        (folder / "user.js").write_text("\n".join(lines))
        log = folder / "firefox.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [PROGRAM, "--headless", "--remote-debugging-port", "0", "--profile", str(folder)],
                stdout=output,
                stderr=output,
                env={
                    "HOME": str(folder),
                    "PATH": "/usr/bin:/bin",
                    "MOZ_CRASHREPORTER_DISABLE": "1",
                },
            )
        try:
            listening = re.compile(r"WebDriver BiDi listening on (ws://127\.0\.0\.1:\d+)")
            found = poll("it listens", lambda: listening.search(log.read_text(errors="replace")))
            assert found is not None
            with connect(f"{found[1]}/session", max_size=None) as socket:
                yield cls(socket)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def send(self, method: str, **params: Any) -> Any:
        """Send a command; its result. AssertionError with Firefox's message if it refuses."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            told = json.loads(self._socket.recv(timeout=_ANSWER_S))
            if told.get("method") == "log.entryAdded" and told["params"]["level"] == "error":
                text = told["params"]["text"]
                if _NO_ICON not in text:
                    self.errors.append(text)
            elif told.get("id") == number:
                assert told["type"] == "success", (method, told)
                return told["result"]

    def open(self, url: str) -> None:
        self.send("browsingContext.navigate", context=self._context, url=url, wait="complete")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression: a text, number, truth value or None."""
        target = {"context": self._context}
        done = self.send("script.evaluate", expression=expression, target=target, awaitPromise=True)
        assert done["type"] == "success", (expression, done)
        return done["result"].get("value")

    def type(self, text: str) -> None:
        """Press the keys of a text in the element that has the focus."""
        presses = [{"type": kind, "value": key} for key in text for kind in ("keyDown", "keyUp")]
        keyboard = {"type": "key", "id": "keyboard", "actions": presses}
        self.send("input.performActions", context=self._context, actions=[keyboard])
