"""What a customer runs: an executor of tools and the callbacks of workflows, on one server of the tests.

The path says how it behaves; everything it is sent is kept.

    /tools                 answers every call with its function's name and arguments
    /tools/slow/S          the same after S seconds
    /tools/size/N          answers every call with N characters
    /tools/status/CODE     an HTTP error
    /tools/round/N/CODE    the error from round N on, the ordinary answer before
    /mcp                   an MCP server without sessions, whose one tool says what it was asked
    /mcp/session           the same with a session, kept in `sessions` until it is closed
    /mcp/session/S         the same, whose tool takes S seconds
    /flow/NAME             the callback registered under NAME: takes the request, gives the answer
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from aiohttp import web

from services.embedded.ports import free_port

Callback = Callable[[dict[str, Any]], Any]


class Received(NamedTuple):
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    at_s: float


class Customer:
    """A context manager; runs in a thread of its own."""

    def __init__(self) -> None:
        self.port = free_port()
        self.received: list[Received] = []
        self.callbacks: dict[str, Callback] = {}
        self.sessions: set[str] = set()
        self.running = 0
        self.peak = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._ready = threading.Event()
        self._stop: asyncio.Event | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Customer:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def at(self, path: str) -> list[Received]:
        return [each for each in self.received if each.path == path]

    def release(self) -> None:
        """Let the callbacks go on that wait in `held`."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._released.set)

    async def held(self) -> None:
        """For callbacks: wait until `release`."""
        await self._released.wait()

    def _serve(self) -> None:
        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            self._stop, self._released = asyncio.Event(), asyncio.Event()
            app = web.Application(client_max_size=64 * 1024 * 1024)
            app.router.add_post("/{path:.*}", self._handle)
            app.router.add_delete("/mcp/{path:.*}", self._close_session)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", self.port, backlog=2048).start()
            self._ready.set()
            await self._stop.wait()
            await runner.cleanup()

        asyncio.run(main())

    async def _handle(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        self.received.append(Received(request.path, dict(request.headers), body, time.monotonic()))
        match request.path.strip("/").split("/"):
            case ["flow", name]:
                answer = self.callbacks[name](body)
                if isinstance(answer, Awaitable):
                    answer = await answer
                if isinstance(answer, web.Response):
                    return answer
                return web.json_response(answer)
            case ["mcp"]:
                return mcp(body)
            case ["mcp", "session", *slow]:
                answer = mcp(body)
                if body["method"] == "initialize":
                    answer.headers["Mcp-Session-Id"] = session = f"session-{len(self.received)}"
                    self.sessions.add(session)
                elif body["method"] == "tools/call":
                    await asyncio.sleep(float(slow[0]) if slow else 0)
                return answer
            case ["tools", "status", code]:
                return web.Response(status=int(code), text="no")
            case ["tools", "size", size]:
                content = "x" * int(size)
                results = [{"tool_call_id": call["id"], "content": content} for call in body["tool_calls"]]
                return web.json_response({"results": results})
            case ["tools", "slow", seconds]:
                self.running += 1
                self.peak = max(self.peak, self.running)
                await asyncio.sleep(float(seconds))
                self.running -= 1
            case ["tools", "round", number, code]:
                seen = [each for each in self.at(request.path) if each.body["custom_id"] == body["custom_id"]]
                if len(seen) >= int(number):
                    return web.Response(status=int(code), text="no")
        return web.json_response({"results": [said(call) for call in body["tool_calls"]]})

    async def _close_session(self, request: web.Request) -> web.Response:
        self.sessions.remove(request.headers["Mcp-Session-Id"])
        return web.Response()


def mcp(asked: dict[str, Any]) -> web.Response:
    match asked["method"]:
        case "initialize":
            result: dict[str, Any] = {"protocolVersion": "2025-11-25", "capabilities": {}}
        case "tools/call":
            result = {"content": [{"type": "text", "text": json.dumps(asked["params"])}]}
        case _:
            return web.Response(status=202)
    return web.json_response({"jsonrpc": "2.0", "id": asked["id"], "result": result})


def said(call: dict[str, Any]) -> dict[str, str]:
    """The result of one call: `name(arguments)`."""
    function = call["function"]
    return {"tool_call_id": call["id"], "content": f"{function['name']}({function['arguments']})"}
