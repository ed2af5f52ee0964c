"""Chromium, driven over its own protocol (Chrome DevTools), and a relay that shows a certificate in its stead.

A browser keeps certificates in a store of its own, which a test would have to fill: so a relay on loopback ends the TLS
with the certificate of whoever looks, and passes on what is said byte for byte.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from forebay.cluster.config.config import Config
from forebay.cluster.security.tls import client_context

CHROMIUM = shutil.which("chromium")

PATIENCE_S = 60.0
"""Seconds that the browser may take to do something: a bound against hanging."""

MESSAGE_BYTES_MAX = 64 * 1024 * 1024

QUALITY = 60
"""Of pictures in WebP, of 100."""

SCREENS: Mapping[str, Mapping[str, Any]] = {
    "desk": {"width": 1400, "height": 900},
    "desk-dark": {"width": 1400, "height": 900, "dark": True},
    "phone": {"width": 390, "height": 844},
    "phone-dark": {"width": 390, "height": 844, "dark": True},
}
"""What people look with."""

TAB, ENTER = "Tab", "Enter"

CONTRASTS = """(() => {
  const channel = (one) => (one /= 255) <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4;
  const parse = (text) => (text.match(/[0-9.]+/g) || []).map(Number);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = (one) => {
    for (; one; one = one.parentElement) {
      const found = parse(getComputedStyle(one).backgroundColor);
      if (found.length === 3 || found[3] === 1) return found;
    }
  };
  const poor = [];
  for (const one of document.querySelectorAll("body *")) {
    if (![...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim())) continue;
    const style = getComputedStyle(one), box = one.getBoundingClientRect();
    if (!box.width || style.visibility === "hidden" || one.closest("progress, title")) continue;
    const colour = one instanceof SVGElement ? style.fill : style.color;
    const [above, below] = [light(parse(colour)), light(behind(one))];
    const ratio = (Math.max(above, below) + 0.05) / (Math.min(above, below) + 0.05);
    if (ratio < 4.5) poor.push([one.textContent.trim().slice(0, 40), ratio]);
  }
  return poor;
})()"""
"""Texts with less contrast than 4.5:1, the least of WCAG 2.1 AA, each with its ratio."""

AXES = """(() => {
  const poor = [];
  for (const one of document.querySelectorAll(".plot")) {
    const values = [...one.querySelectorAll(".y span")].map((label) => label.textContent);
    const boxes = [...one.querySelectorAll(".x text")].map((label) => label.getBoundingClientRect());
    if (values.length < 2 || !values.every((label) => /^[0-9]/.test(label)) || !boxes.length
      || boxes.some((box, place) => place && box.left < boxes[place - 1].right)) {
      poor.push([one.querySelector("[aria-label]").getAttribute("aria-label"), values, boxes.length]);
    }
  }
  return poor;
})()"""
"""Charts whose axes lack labels, or have labels that overlap."""

CUT = """[...document.querySelectorAll("body *")].filter((one) => {
  const style = getComputedStyle(one);
  return style.overflowX === "hidden" && one.clientWidth > 1 && one.scrollWidth > one.clientWidth;
}).map((one) => one.textContent.slice(0, 40))"""
"""Texts of which a part cannot be seen."""


@asynccontextmanager
async def relayed(config: Config, identity: str, replica: str) -> AsyncIterator[str]:
    """Yield a URL on loopback behind which a replica is, asked with an identity's certificate."""
    context = client_context(config.tls_files(identity))
    api = config.replica(replica).api
    tasks: set[asyncio.Task[None]] = set()

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        try:
            inner, outer = await asyncio.open_connection(api.host, api.port, ssl=context)
        except OSError:
            writer.close()  # the replica is away, and so the browser sees it
            return
        with suppress(asyncio.CancelledError):
            await asyncio.gather(pipe(reader, outer), pipe(inner, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tuple(tasks):
            task.cancel()


class Browser:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self.said: list[str] = []
        """What pages wrote to the console, refusals of their policy among it."""
        self.asked: list[str] = []
        """The addresses that were asked."""
        self._loaded = asyncio.Event()

    async def listen(self) -> None:
        """Take what the browser says."""
        async for message in self._socket:
            found = json.loads(message.data)
            if "id" in found:
                future = self._waiting.pop(found["id"])
                if "error" in found:
                    future.set_exception(AssertionError(found["error"]))
                else:
                    future.set_result(found["result"])
                continue
            match found["method"], found["params"]:
                case "Runtime.consoleAPICalled", params:
                    self.said.append(str([one.get("value") for one in params["args"]]))
                case "Runtime.exceptionThrown", params:
                    self.said.append(str(params["exceptionDetails"]))
                case "Log.entryAdded", params:
                    self.said.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
                case "Network.requestWillBeSent", params:
                    self.asked.append(params["request"]["url"])
                case "Page.loadEventFired", _:
                    self._loaded.set()

    async def send(self, method: str, **params: Any) -> Any:
        """Have the browser do something, and return what it answers."""
        self._number += 1
        future = self._waiting[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_str(json.dumps({"id": self._number, "method": method, "params": params}))
        async with asyncio.timeout(PATIENCE_S):
            return await future

    async def open(self, url: str) -> None:
        """Go to a page, and wait until it is loaded."""
        self._loaded.clear()
        await self.send("Page.navigate", url=url)
        async with asyncio.timeout(PATIENCE_S):
            await self._loaded.wait()

    async def run(self, script: str) -> Any:
        """Return what an expression comes to in the page."""
        answer = await self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, script: str) -> Any:
        """Wait until an expression is true in the page, and return it."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not (found := await self.run(script)):
                    await asyncio.sleep(0.05)
                return found
        except TimeoutError:
            shown = await self.run("location.href + '\\n' + document.body.innerText")
            raise AssertionError(f"{script} is not true of {shown}") from None

    async def press(self, key: str) -> None:
        """Press a key."""
        code = {TAB: 9, ENTER: 13}[key]
        text = {"text": "\r"} if key == ENTER else {}
        await self.send("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, **text)
        await self.send("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)

    async def look(self, *, width: int, height: int, dark: bool = False, scale: float = 1.0) -> None:
        """Have a screen of so many pixels, light or dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        await self.send("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.send("Emulation.setEmulatedMedia", features=features)

    async def scripts(self, *, run: bool) -> None:
        """Say whether pages may run scripts."""
        await self.send("Emulation.setScriptExecutionDisabled", value=not run)

    async def picture(self, file: Path, *, first_screen: bool = False) -> None:
        """Write the whole page, however long it is, or its first screen, as a picture in the format of its suffix."""
        kind: dict[str, Any] = {"format": file.suffix[1:]} | ({"quality": QUALITY} if file.suffix == ".webp" else {})
        answer = await self.send("Page.captureScreenshot", captureBeyondViewport=not first_screen, **kind)
        file.write_bytes(base64.b64decode(answer["data"]))

    async def pictures(self, url: str, directory: Path, name: str, screens: Mapping[str, Mapping[str, Any]]) -> None:
        """Open a page, write it as it is on each of these screens, and check that all of it can be read."""
        for screen, size in screens.items():
            await self.look(**size)
            await self.open(url)
            await self.picture(directory / f"{name}-{screen}.png")
            assert await self.run("document.documentElement.scrollWidth <= innerWidth"), (name, screen)
            for fault in (CONTRASTS, AXES, CUT):
                found = await self.run(fault)
                assert found == [], f"{name} on {screen}: {found}"


@asynccontextmanager
async def browser(profile: Path) -> AsyncIterator[Browser]:
    """Yield a new Chromium, which resolves no names and goes nowhere but to loopback."""
    assert CHROMIUM is not None
    options = (
        *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-sync"),
        *("--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0"),
        *("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", f"--user-data-dir={profile}", "about:blank"),
    )
    nothing = subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(CHROMIUM, *options, stdout=nothing, stderr=nothing)
    try:
        told = profile / "DevToolsActivePort"
        async with asyncio.timeout(PATIENCE_S):
            while not told.exists() or not told.read_text().strip():
                await asyncio.sleep(0.05)
        port = told.read_text().split()[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                tab = next(one for one in await answer.json() if one["type"] == "page")
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=MESSAGE_BYTES_MAX) as socket:
                found = Browser(socket)
                listening = asyncio.get_running_loop().create_task(found.listen())
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await found.send(f"{domain}.enable")
                yield found
                listening.cancel()
    finally:
        process.terminate()
        async with asyncio.timeout(PATIENCE_S):
            await process.wait()
