"""A server of the official MCP SDK, of major version 1 or 2, whichever is installed: a program of its own.

python mcp_server.py PORT [stateless] [json] [idle:SECONDS]

lookup(city)    a sentence about a city
fail(reason)    reports an error, which is an answer
parts()         two texts with an image between them
talk()          notifications, a ping and a request of its own before the answer
slow(seconds)   takes its time
"""

from __future__ import annotations

import asyncio
import sys
from importlib import metadata
from typing import Any

from mcp import types
from mcp.shared.message import ServerMessageMetadata

VERSION = int(metadata.version("mcp").partition(".")[0])
PORT, OPTIONS = int(sys.argv[1]), sys.argv[2:]
IDLE = next((float(option.partition(":")[2]) for option in OPTIONS if option.startswith("idle:")), None)

if VERSION == 1:
    from mcp.server.fastmcp import Context, FastMCP, Image
    from mcp.server.fastmcp.exceptions import ToolError

    server: Any = FastMCP(
        "test",
        host="127.0.0.1",
        port=PORT,
        stateless_http="stateless" in OPTIONS,
        json_response="json" in OPTIONS,
        log_level="WARNING",
    )
else:
    from mcp.server.mcpserver import Context, Image, MCPServer
    from mcp.server.mcpserver.exceptions import ToolError

    server = MCPServer("test", log_level="WARNING")


@server.tool()
def lookup(city: str = "nowhere") -> str:
    return f"It is 18 degrees in {city}."


@server.tool()
def fail(reason: str) -> str:
    raise ToolError(reason)


@server.tool(structured_output=False)
def parts() -> list[Any]:
    return ["first, ", Image(data=b"not shown", format="png"), "second"]


@server.tool()
async def slow(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"


@server.tool()
async def talk(context: Context) -> str:  # type: ignore[type-arg]
    await context.info("thinking")
    await ask(context, types.PingRequest(), types.EmptyResult)
    try:
        await ask(context, types.ListRootsRequest(), types.ListRootsResult)
    except Exception as error:
        return f"asked and was told: {error}"
    return "was given roots"


async def ask(context: Any, request: Any, answer: Any) -> Any:
    """A request of the server on the stream of the call it is made in."""
    if VERSION == 1:
        request = types.ServerRequest(request)
    related = ServerMessageMetadata(related_request_id=context.request_id)
    return await context.session.send_request(request, answer, metadata=related)


if __name__ == "__main__":
    if VERSION == 1:
        server.run("streamable-http")
    else:
        import uvicorn

        app = server.streamable_http_app(
            stateless_http="stateless" in OPTIONS,
            json_response="json" in OPTIONS,
            **({} if IDLE is None else {"session_idle_timeout": IDLE}),
        )
        uvicorn.run(app, host="127.0.0.1", port=PORT, log_level="warning")
