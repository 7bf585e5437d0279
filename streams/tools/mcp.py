"""The `mcp` executor: an MCP server over Streamable HTTP, JSON-RPC 2.0 by POST.

    first turn    initialize                    404 or 405: no handshake there, tools/call directly
                  notifications/initialized
    each call     tools/call                    404 with a session: initialize again, once
    at the end    DELETE                        only with a session; what comes of it does not matter

An answer is one JSON message or a stream of events. In a stream the last response counts; requests that the
server makes on it are answered (a ping) or refused, so that it need not wait for what we do not offer.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import msgspec
import structlog
from msgspec import UNSET, Raw

from schemas.tools import (
    MCP_CLIENT_NAME,
    MCP_VERSION,
    MCP_VERSIONS,
    CallToolResult,
    InitializeResult,
    RpcMessage,
    RpcReply,
    RpcRequest,
    ToolCall,
)
from streams.core import bodies
from streams.core.sse import EventStream
from streams.core.toolconfig import ToolConfig
from streams.core.toolloop import RunTools
from streams.tools.egress import Egress, EgressFailed, Reply
from streams.tools.failure import ToolFailed, headers

CLIENT_VERSION = "1"
CLOSE_TIMEOUT_S = 5.0
MAX_SESSION_ID = 4_096
UNSUPPORTED_VERSION = -32_022
METHOD_NOT_FOUND = -32_601

NOT_ARGUMENTS = "The arguments of this call are not a JSON object. Call the tool again with valid arguments."

log = structlog.get_logger("openrelay.tools")

_encode = msgspec.json.Encoder().encode
_decode_message = msgspec.json.Decoder(RpcMessage | list[RpcMessage]).decode
_decode_initialized = msgspec.json.Decoder(InitializeResult).decode
_decode_result = msgspec.json.Decoder(CallToolResult).decode
_decode_object = msgspec.json.Decoder(dict[str, Raw]).decode
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

_INITIALIZE = Raw(
    _encode(
        {
            "protocolVersion": MCP_VERSION,
            "capabilities": {},
            "clientInfo": {"name": MCP_CLIENT_NAME, "version": CLIENT_VERSION},
        }
    )
)


class _Answer(NamedTuple):
    status: int
    session: str | None
    message: RpcMessage | None
    """The response, None when there was none."""


class McpExecutor:
    """One record's conversation with its server."""

    def __init__(self, egress: Egress, config: ToolConfig) -> None:
        self._egress = egress
        self._config = config
        self._headers = headers(config) | {"Accept": "application/json, text/event-stream"}
        self._ids = itertools.count(1)
        self._initialized = False
        self._session: str | None = None
        self._version: str | None = None

    async def run(self, turn: RunTools) -> list[str]:
        """One `tools/call` after the other. Raises ToolFailed."""
        try:
            if not self._initialized:
                await self._initialize()
            return [await self._call(call) for call in turn.calls]
        except EgressFailed as failure:
            raise ToolFailed(f"the MCP server could not be used: {failure}") from None

    async def close(self) -> None:
        """End the session. The record's result does not depend on it."""
        if self._session is None:
            return
        timeout_s = min(CLOSE_TIMEOUT_S, self._timeout_s)
        try:
            async with self._egress.request(
                "DELETE", self._config.url, headers=self._sent(), body=None, timeout_s=timeout_s
            ):
                pass
        except EgressFailed as failure:
            log.debug("an MCP session was not closed", reason=str(failure))

    @property
    def _timeout_s(self) -> float:
        return self._config.timeout_ms / 1000

    def _sent(self) -> dict[str, str]:
        sent = dict(self._headers)
        if self._session is not None:
            sent["Mcp-Session-Id"] = self._session
        if self._version is not None:
            sent["MCP-Protocol-Version"] = self._version
        return sent

    async def _initialize(self) -> None:
        self._session = self._version = None
        answer = await self._request("initialize", _INITIALIZE)
        self._initialized = True
        if answer.status in (404, 405):
            return
        result = self._result("initialize", answer)
        try:
            version = _decode_initialized(result).protocolVersion
        except _UNREADABLE:
            raise ToolFailed("the MCP server's answer to initialize has no usable protocolVersion") from None
        if version not in MCP_VERSIONS:
            raise ToolFailed(f"the MCP server speaks none of the revisions {', '.join(sorted(MCP_VERSIONS))}")
        session = answer.session
        if session is not None and not (
            0 < len(session) <= MAX_SESSION_ID and all("!" <= character <= "~" for character in session)
        ):
            raise ToolFailed("the MCP server's session id is not visible ASCII, or too long")
        self._session, self._version = session, version
        status = (await self._post(_encode(RpcRequest("notifications/initialized")))).status
        if not 200 <= status < 300:
            raise ToolFailed(f"the MCP server answered notifications/initialized with status {status}")

    async def _call(self, call: ToolCall) -> str:
        arguments = self._arguments(call)
        if arguments is None:
            return NOT_ARGUMENTS
        params = Raw(b'{"name":' + _encode(call.function.name) + b',"arguments":' + arguments + b"}")
        answer = await self._request("tools/call", params)
        if answer.status == 404 and self._session is not None:
            await self._initialize()
            answer = await self._request("tools/call", params)
        try:
            content = _decode_result(self._result("tools/call", answer)).content
        except _UNREADABLE:
            raise ToolFailed("the MCP server's result has no usable content") from None
        return "".join(item.text for item in content if item.type == "text")

    def _arguments(self, call: ToolCall) -> bytes | None:
        """The arguments to send, None when what the model wrote is not an object."""
        written = call.function.arguments.encode() or b"{}"
        try:
            _decode_object(written)
        except _UNREADABLE:
            return None
        if self._config.context is None:
            return written
        return bodies.with_members(written, {"_context": self._config.context})

    def _result(self, method: str, answer: _Answer) -> Raw:
        """The result in an answer; raises ToolFailed when it is none."""
        status, _, message = answer
        error = UNSET if message is None else message.error
        if error is not UNSET and error.code == UNSUPPORTED_VERSION:
            raise ToolFailed(
                f"the MCP server refused {method}: it speaks only revisions later than {MCP_VERSION}"
            )
        if not 200 <= status < 300:
            raise ToolFailed(f"the MCP server answered {method} with status {status}")
        if error is not UNSET:
            raise ToolFailed(f"the MCP server answered {method} with JSON-RPC error {error.code}")
        if message is None or message.result is UNSET:
            raise ToolFailed(f"the MCP server did not answer {method} with a JSON-RPC response")
        return message.result

    async def _request(self, method: str, params: Raw) -> _Answer:
        number = next(self._ids)
        answer = await self._post(_encode(RpcRequest(method, id=number, params=params)))
        message = answer.message
        if message is not None and message.error is UNSET and message.id != number:
            raise ToolFailed(f"the MCP server answered {method} under another id")
        return answer

    async def _post(self, body: bytes) -> _Answer:
        async with self._egress.request(
            "POST", self._config.url, headers=self._sent(), body=body, timeout_s=self._timeout_s
        ) as reply:
            if reply.media_type == "text/event-stream" and 200 <= reply.status < 300:
                message = await self._last_response(reply)
            else:
                message = _response(await reply.read())
            return _Answer(reply.status, reply.header("Mcp-Session-Id"), message)

    async def _last_response(self, reply: Reply) -> RpcMessage | None:
        last = None
        events = EventStream()
        async for chunk in reply.chunks():
            for data in events.feed(chunk):
                for message in _messages(data):
                    if message.is_response:
                        last = message
                    elif message.method is not UNSET and message.id is not None:
                        await self._answer(message.method, message.id)
        return last

    async def _answer(self, method: str, number: int | str) -> None:
        """Answer a request of the server, on a connection of its own; it does not answer in turn."""
        if method == "ping":
            reply = RpcReply(number, result={})
        else:
            reply = RpcReply(number, error={"code": METHOD_NOT_FOUND, "message": "Method not found"})
        async with self._egress.request(
            "POST", self._config.url, headers=self._sent(), body=_encode(reply), timeout_s=self._timeout_s
        ):
            pass


def _messages(data: bytes) -> list[RpcMessage]:
    """The messages in one event, or one body. Raises ToolFailed."""
    try:
        found = _decode_message(data)
    except _UNREADABLE:
        raise ToolFailed("the MCP server sent something that is not JSON-RPC") from None
    return found if isinstance(found, list) else [found]


def _response(body: bytes) -> RpcMessage | None:
    """The last response in a body of one message; None when it holds none."""
    try:
        found = _messages(body)
    except ToolFailed:
        return None
    return next((message for message in reversed(found) if message.is_response), None)
