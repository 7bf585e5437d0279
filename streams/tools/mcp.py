"""The `mcp` executor: an MCP server over Streamable HTTP, JSON-RPC 2.0 by POST.

    first turn    initialize                    404 or 405: no handshake there, tools/call directly
                  notifications/initialized
    each call     tools/call                    404 with a session: initialize again, once in all
    at the end    DELETE                        only with a session; what comes of it does not matter

An answer is one JSON message or a stream of events. In a stream the last response counts; requests that the
server makes on it are answered (a ping) or refused, so that it need not wait for what we do not offer. Once
the response to what we asked has come, the rest of the stream has a moment, and how it ends does not matter.
No stream is opened by GET, which is a client's to choose; requests that a server makes there are not heard.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import AsyncIterator
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
from streams.core.strictjson import NotJson, parse
from streams.core.toolconfig import ToolConfig
from streams.core.toolloop import RunTools
from streams.tools.egress import Egress, EgressFailed, Reply, Room
from streams.tools.failure import ToolFailed, headers

CLIENT_VERSION = "1"
CLOSE_TIMEOUT_S = 5.0
MAX_SESSION_ID = 4_096
AFTER_RESPONSE_S = 1.0
"""What may still come of a stream behind the response to our request has so long."""

LATER_REVISIONS = frozenset({-32_020, -32_021, -32_022})
"""Errors that revisions after `MCP_VERSION` have for requests of earlier ones."""

METHOD_NOT_FOUND = -32_601

NOT_ARGUMENTS = "The arguments of this call are not a JSON object. Call the tool again with valid arguments."

log = structlog.get_logger("openrelay.tools")

_encode = msgspec.json.Encoder().encode
_decode_message = msgspec.json.Decoder(RpcMessage | list[RpcMessage]).decode
_decode_initialized = msgspec.json.Decoder(InitializeResult).decode
_decode_result = msgspec.json.Decoder(CallToolResult).decode
_decode_object = msgspec.json.Decoder(dict[str, Raw]).decode
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_REVISION = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)

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
    size: int
    """Bytes of room that it took."""


class McpExecutor:
    """One record's conversation with its server. Answers are read into `room`; contents stay there."""

    def __init__(self, egress: Egress, config: ToolConfig, room: Room | None = None) -> None:
        self._egress = egress
        self._room = room
        self._config = config
        self._headers = headers(config) | {"Accept": "application/json, text/event-stream"}
        self._ids = itertools.count(1)
        self._initialized = False
        self._begun_again = False
        self._session: str | None = None
        self._version: str | None = None

    async def run(self, turn: RunTools) -> list[str]:
        """One `tools/call` after the other. Raises ToolFailed."""
        try:
            if not self._initialized:
                await self._initialize()
            # As bytes until all are there: a text may take four times their room.
            contents = [await self._call(call) for call in turn.calls]
            return [content.decode() for content in contents]
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
        answer = await self._request("initialize", _INITIALIZE, unread=(404, 405))
        self._initialized = True
        self._give(answer.size)
        if answer.status in (404, 405):
            return
        result = self._result("initialize", answer)
        try:
            version = _decode_initialized(result).protocolVersion
        except _UNREADABLE:
            raise ToolFailed("the MCP server's answer to initialize has no usable protocolVersion") from None
        if _REVISION.fullmatch(version) and version > MCP_VERSION:
            raise ToolFailed(f"the MCP server speaks only revision {version}, later than {MCP_VERSION}")
        if version not in MCP_VERSIONS:
            raise ToolFailed(f"the MCP server speaks none of the revisions {', '.join(sorted(MCP_VERSIONS))}")
        session = answer.session
        if session is not None and not (
            0 < len(session) <= MAX_SESSION_ID and all("!" <= character <= "~" for character in session)
        ):
            raise ToolFailed("the MCP server's session id is not visible ASCII, or too long")
        self._session, self._version = session, version
        status, _, _, size = await self._post(_encode(RpcRequest("notifications/initialized")))
        self._give(size)
        if not 200 <= status < 300:
            raise ToolFailed(f"the MCP server answered notifications/initialized with status {status}")

    async def _call(self, call: ToolCall) -> bytes:
        """The content for the model, in UTF-8."""
        arguments = self._arguments(call)
        if arguments is None:
            return NOT_ARGUMENTS.encode()
        params = Raw(b'{"name":' + _encode(call.function.name) + b',"arguments":' + arguments + b"}")
        lost = () if self._session is None or self._begun_again else (404,)
        answer = await self._request("tools/call", params, unread=lost)
        if answer.status in lost:
            self._begun_again = True
            await self._initialize()
            answer = await self._request("tools/call", params)
        try:
            content = _decode_result(self._result("tools/call", answer)).content
        except _UNREADABLE:
            raise ToolFailed("the MCP server's result has no usable content") from None
        said = "".join(item.text for item in content if item.type == "text").encode()
        self._give(answer.size - len(said))
        return said

    def _give(self, size: int) -> None:
        if self._room is not None:
            self._room.give(size)

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
        status, _, message, _ = answer
        error = UNSET if message is None else message.error
        if error is not UNSET and (
            (self._version is None and error.code in LATER_REVISIONS)
            or (method == "initialize" and error.code == METHOD_NOT_FOUND)
        ):
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

    async def _request(self, method: str, params: Raw, *, unread: tuple[int, ...] = ()) -> _Answer:
        """The answer to a request; that of an `unread` status without its body."""
        number = next(self._ids)
        body = _encode(RpcRequest(method, id=number, params=params))
        answer = await self._post(body, number, unread)
        message = answer.message
        if message is not None and message.error is UNSET and message.id != number:
            raise ToolFailed(f"the MCP server answered {method} under another id")
        return answer

    async def _post(self, body: bytes, number: int = 0, unread: tuple[int, ...] = ()) -> _Answer:
        heard: _Answer | None = None
        try:
            async with self._egress.request(
                "POST",
                self._config.url,
                headers=self._sent(),
                body=body,
                timeout_s=self._timeout_s,
                room=self._room,
            ) as reply:
                session, message = reply.header("Mcp-Session-Id"), None
                if reply.status in unread:
                    pass
                elif reply.media_type == "text/event-stream" and 200 <= reply.status < 300:
                    async for message in self._responses(reply):
                        if message.id == number or message.error is not UNSET:
                            heard = _Answer(reply.status, session, message, reply.size)
                            reply.hurry(AFTER_RESPONSE_S)
                else:
                    message = await self._egress.take_apart(_response, await reply.read())
                answer = heard or _Answer(reply.status, session, message, 0)
                return answer._replace(size=reply.size)
        except (EgressFailed, ToolFailed):
            if heard is None:
                raise
            return heard._replace(size=0)  # the room was given back

    async def _responses(self, reply: Reply) -> AsyncIterator[RpcMessage]:
        """The responses in a stream; requests of the server are answered on the way."""
        events = EventStream()
        async for chunk in reply.chunks():
            for data in events.feed(chunk):
                for message in await self._egress.take_apart(_messages, data):
                    if message.is_response:
                        yield message
                    elif message.method is not UNSET and message.id is not None:
                        await self._answer(message.method, message.id)

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
        parse(data)
        found = _decode_message(data)
    except NotJson as error:
        raise ToolFailed(f"what the MCP server sent {error.unquoted}") from None
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
