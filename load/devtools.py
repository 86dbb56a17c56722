"""Drives a headless Chromium over its DevTools protocol: pages, keys, what they log and break."""

import asyncio
import base64
import contextlib
import itertools
import json
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import browser
from slipstream.launch import die_with_parent

_OPTIONS = (
    "--headless",
    "--no-sandbox",  # it needs user namespaces, which containers lack; the pages are ours
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-port=0",
)
_START_S, _ANSWER_S = 120.0, 120.0
# Keys with a code of their own: DOM name -> Windows' virtual key code, and the text that it types.
_KEYS = {
    "Enter": (13, "\r"),
    "Escape": (27, ""),
    "Tab": (9, ""),
    "ArrowUp": (38, ""),
    "ArrowDown": (40, ""),
    "ArrowLeft": (37, ""),
    "ArrowRight": (39, ""),
    "Backspace": (8, ""),
    " ": (32, " "),
}
_MODIFIERS = {"Alt": 1, "Control": 2, "Meta": 4, "Shift": 8}


class PageError(Exception):
    """What a page, or the browser, answered instead of a result."""


class Page:
    """A tab with storage of its own."""

    def __init__(self, chromium: "Chromium", session: str) -> None:
        self._chromium, self._session = chromium, session
        self.faults: list[str] = []  # errors, warnings and broken rules of content, as they came
        self.posts: list[dict[str, Any]] = []  # JSON bodies that it sent
        for domain in ("Page", "Runtime", "Log", "Network", "Audits"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: object) -> Any:
        """Return the result of a command. Raises PageError."""
        return self._chromium.send(method, self._session, **parameters)

    def open(self, url: str) -> None:
        """Load a URL, to the end of its scripts."""
        self.send("Page.navigate", url=url)
        self.wait(f"location.href.startsWith({json.dumps(url)}) && document.readyState=='complete'")

    def run(self, expression: str) -> Any:
        """Return the value of an expression, awaited. Raises PageError with what it threw."""
        found = self.send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise PageError(details.get("exception", {}).get("description", details["text"]))
        return found["result"].get("value")

    def wait(self, expression: str, timeout_s: float = 120.0) -> None:
        """Return once an expression is true. Raises PageError."""
        end = time.monotonic() + timeout_s
        while not self.run(f"(async () => Boolean(await ({expression})))()"):
            if time.monotonic() > end:
                shown = self.run("document.body.innerText")
                raise PageError(f"not in {timeout_s:.0f} s: {expression}\nthe page:\n{shown}")
            time.sleep(0.03)

    def type(self, text: str) -> None:
        """Insert text where the focus is."""
        self.send("Input.insertText", text=text)

    def press(self, keys: str) -> None:
        """Press a key with modifiers, such as `Control+k`."""
        *held, key = keys.split("+") if keys != "+" else ["+"]
        modifiers = sum(_MODIFIERS[one] for one in held)
        code, text = _KEYS.get(key, (ord(key[0].upper()), key))
        shared = {"key": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        typed = {"text": text} if text and modifiers in (0, _MODIFIERS["Shift"]) else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", **shared, **typed)
        self.send("Input.dispatchKeyEvent", type="keyUp", **shared)

    def click(self, selector: str) -> None:
        """Click in the middle of an element with the mouse."""
        where = json.dumps(selector)
        self.run(f"document.querySelector({where}).scrollIntoView({{block: 'nearest'}})")
        box = f"document.querySelector({where}).getBoundingClientRect()"
        x, y = self.run(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({box})")
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def resize(self, width: int, height: int, is_phone: bool = False) -> None:
        """Set the size of the window in CSS pixels."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1.5 if is_phone else 1,
            mobile=is_phone,
        )

    def prefer(self, scheme: str) -> None:
        """Set what the system prefers: `light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, file: Path) -> None:
        """Write what the window shows as a PNG."""
        file.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))

    def note(self, method: str, parameters: dict[str, Any]) -> None:
        """Keep a fault or a body that was sent."""
        match method:
            case "Network.requestWillBeSent" if "postData" in parameters["request"]:
                self.posts.append(json.loads(parameters["request"]["postData"]))
            case "Runtime.exceptionThrown":
                self.faults.append(json.dumps(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.faults.append(json.dumps(parameters["args"]))
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                entry = parameters["entry"]
                self.faults.append(f"{entry['source']}: {entry['text']} {entry.get('url', '')}")
            case "Audits.issueAdded":
                self.faults.append(json.dumps(parameters["issue"]))


class Chromium:
    """A running browser; a context manager ends it."""

    def __init__(self, *options: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        self._loop = asyncio.new_event_loop()
        self._numbers = itertools.count(1)
        self._pages: dict[str, Page] = {}
        self._process = subprocess.Popen(
            [browser.get(), *_OPTIONS, *options, f"--user-data-dir={self._folder.name}"],
            env=browser.environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent(),
        )
        try:
            self._loop.run_until_complete(self._connect(self._address()))
        except BaseException:
            self.close()
            raise

    @property
    def has_ended(self) -> bool:
        """Whether the browser has ended, has closed its connection, or does not answer.

        It is asked: nothing reads the connection between two calls, so an end is seen by a call.
        """
        if self._process.poll() is not None or self._socket.closed:
            return True
        try:
            self.send("Browser.getVersion")
        except (PageError, aiohttp.ClientError, OSError, TimeoutError):
            return True
        return False

    def __enter__(self) -> "Chromium":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the browser and remove what it wrote."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(AttributeError):
            self._loop.run_until_complete(self._http.close())
        self._loop.close()
        self._folder.cleanup()

    @contextlib.contextmanager
    def page(self) -> Iterator[Page]:
        """Open an empty tab, whose storage no other one shares."""
        context = self.send("Target.createBrowserContext")["browserContextId"]
        target = self.send("Target.createTarget", url="about:blank", browserContextId=context)
        session = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = Page(self, session["sessionId"])
        self._pages[session["sessionId"]] = page
        try:
            yield page
        finally:
            self._pages.pop(session["sessionId"])
            self.send("Target.disposeBrowserContext", browserContextId=context)

    def send(self, method: str, session: str | None = None, **parameters: object) -> Any:
        """Return the result of a command. Raises PageError."""
        call = {"id": next(self._numbers), "method": method, "params": parameters}
        if session is not None:
            call["sessionId"] = session
        return self._loop.run_until_complete(asyncio.wait_for(self._call(call), _ANSWER_S))

    def _address(self) -> str:
        """Return the WebSocket's URL, which the browser writes when it is ready."""
        assert self._process.stderr is not None
        said: list[str] = []
        for line in self._process.stderr:
            if (found := re.search(r"DevTools listening on (ws://\S+)", line)) is not None:
                threading.Thread(target=self._process.stderr.read, daemon=True).start()
                return found[1]
            said.append(line.strip())
        raise browser.BrowserError(f"the browser ended: {said[-1] if said else 'no reason given'}")

    async def _connect(self, url: str) -> None:
        self._http = aiohttp.ClientSession()
        self._socket = await asyncio.wait_for(
            self._http.ws_connect(url, max_msg_size=0, heartbeat=None), _START_S
        )

    async def _call(self, call: dict[str, Any]) -> Any:
        await self._socket.send_json(call)
        async for message in self._socket:
            answer = json.loads(message.data)
            if answer.get("id") == call["id"]:
                if "error" in answer:
                    raise PageError(f"{call['method']}: {answer['error']['message']}")
                return answer["result"]
            if (page := self._pages.get(answer.get("sessionId", ""))) is not None:
                page.note(answer["method"], answer["params"])
        raise PageError("the browser has closed its connection")
