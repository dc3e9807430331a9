"""A headless Chromium that tests talk to over the DevTools protocol, through pipes.

Tests wait for states of the page, never for a time: `Tab.wait(condition)` returns as soon as the condition holds.  What
does not come within `PATIENCE` seconds is an error that names it, so that no test waits for ever.
"""

import base64
import json
import os
import select
import shutil
import signal
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
]

PATIENCE = 120.0  # seconds without an answer, or in which a condition stays false; machines may be slow and shared

# Resolves at the next frame, or after 100 ms where there is none.
LATER = "new Promise((done) => (requestAnimationFrame(done), setTimeout(done, 100)))"
# Holds when no element says that it still waits for its data.
READY = 'document.readyState === "complete" && document.querySelector("[aria-busy=true]") === null'


class Browser:
    """One browser process with its own profile; `with Browser(profile) as browser: tab = browser.open(page)`."""

    def __init__(self, profile: Path) -> None:
        self.profile = profile

    def __enter__(self) -> "Browser":
        commands, self.to_browser = os.pipe()
        from_browser, answers = os.pipe()
        options = [*OPTIONS, f"--user-data-dir={self.profile}", "about:blank"]
        # The browser reads its commands from descriptor 3 and writes its answers to descriptor 4.
        descriptors = [
            (os.POSIX_SPAWN_DUP2, commands, 3),
            (os.POSIX_SPAWN_DUP2, answers, 4),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        ]
        command = [str(CHROMIUM), *options]
        self.process = os.posix_spawn(command[0], command, os.environ, file_actions=descriptors)
        os.close(commands)
        os.close(answers)
        self.answers = os.fdopen(from_browser, "rb")
        self.unread = b""
        self.number = 0
        self.events: list[dict[str, Any]] = []
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.kill(self.process, signal.SIGTERM)
        os.waitpid(self.process, 0)
        os.close(self.to_browser)
        self.answers.close()

    def call(self, method: str, session: str | None = None, **parameters: object) -> dict[str, Any]:
        """Send one command and return its result; events that arrive before it are collected in `events`.

        Raises TimeoutError when the browser sends nothing for `PATIENCE` seconds.
        """
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read(f"{method} {json.dumps(parameters)[:500]}")
            if answer.get("id") == self.number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _read(self, awaited: str) -> dict[str, Any]:
        """The next message; `awaited` is what an error says was waited for."""
        while b"\0" not in self.unread:
            if not select.select([self.answers], [], [], PATIENCE)[0]:
                raise TimeoutError(f"the browser sent nothing for {PATIENCE:.0f} s; waited for {awaited}")
            piece = os.read(self.answers.fileno(), 1 << 16)
            assert piece, "the browser ended"
            self.unread += piece
        line, _, self.unread = self.unread.partition(b"\0")
        message = json.loads(line)
        if "method" in message:
            self.events.append(message)
        return message

    def open(
        self, page: Path | str, *, width: int = 1280, height: int = 900, dark: bool = False, before: str = ""
    ) -> "Tab":
        """The page, a file or an address, in a new tab.  The script `before` runs before those of the page."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session)
        for domain in ("Page", "Runtime", "Log"):
            tab.call(f"{domain}.enable")
        tab.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        tab.call("Emulation.setEmulatedMedia", features=[scheme])
        if before:
            tab.call("Page.addScriptToEvaluateOnNewDocument", source=before)
        tab.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        tab.wait('location.href !== "about:blank" && document.readyState === "complete"')
        return tab


class Tab:
    """One page in the browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.browser, self.session = browser, session

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        return self.browser.call(method, self.session, **parameters)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str = READY) -> "Tab":
        """Return when the condition holds.  It is looked at once a frame, or every 100 ms in a tab that gets no frames.

        Raises TimeoutError with the condition and what the page wrote on the console, after `PATIENCE` seconds.
        """
        began = time.monotonic()
        while not self.evaluate(f"{LATER}.then(() => {condition})"):
            if time.monotonic() - began > PATIENCE:
                raise TimeoutError(f"after {PATIENCE:.0f} s not yet: {condition}; on the console: {self.console()}")
        return self

    def html(self) -> str:
        return str(self.evaluate("document.documentElement.outerHTML"))

    def console(self) -> list[str]:
        """Everything this page wrote on the console: messages, exceptions, refusals of the content policy."""
        events = [e for e in self.browser.events if e.get("sessionId") == self.session]
        names = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in events if event["method"] in names]

    def screenshot(self, path: Path) -> None:
        """The whole page, from top to bottom, as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))
