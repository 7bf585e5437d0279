"""HTTP/1.1 of the simulator: one object a connection, straight on the event loop.

The server stands in for a GPU server in load tests, where it must cost less than what it measures; so it
parses with llhttp and writes each answer in one piece. Requests of a connection are answered in their order
(pipelined ones wait), bodies may be chunked, and a connection that has many requests waiting is not read.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from http import HTTPStatus
from typing import cast

import httptools

from services.simulator.answers import Delivery, Reply, error
from services.simulator.model import Call, SimulatedModel
from services.simulator.prompts import BadRequest, read_chat, read_completion
from services.simulator.routes import route

MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_PENDING = 64
"""Requests of one connection that may wait; up to this many, it is read on, so that its end is noticed."""

_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
_LINGER_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER on with zero seconds: closing sends RST instead of FIN."""


class Connection(asyncio.Protocol):
    """One client's connection. `connections` is the server's set of open ones."""

    def __init__(self, model: SimulatedModel, connections: set[Connection]) -> None:
        self._model = model
        self._connections = connections
        self._parser = httptools.HttpRequestParser(self)
        self._peer = ""
        self._url = b""
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._expects = False
        self._pending: deque[tuple[bytes, bytes, bytes, bool]] = deque()
        """Requests not started: method, path, body, whether the connection stays open after it."""
        self._call: Call | None = None
        self._busy = False
        """An answer is being made or written."""
        self._keep_alive = True
        self._write_paused = False
        self._read_paused = False
        self._advancing = False
        self._closing = False
        self._drip: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self._peer = f"{peer[0]}:{peer[1]}" if peer else ""
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._closing = True
        self._pending.clear()
        if self._drip is not None:
            self._drip.cancel()
        if self._call is not None:
            self._model.abandon(self._call)

    def pause_writing(self) -> None:
        self._write_paused = True

    def resume_writing(self) -> None:
        self._write_paused = False
        self._advance()

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(error(400, "This server speaks HTTP/1.1 only."))
        except httptools.HttpParserError as fault:
            self._refuse(error(400, f"Not an HTTP request: {fault}."))
        if len(self._pending) > MAX_PENDING and not self._closing:
            self._read_paused = True
            self._transport.pause_reading()

    def close(self) -> None:
        self._closing = True
        self._transport.abort()

    # Called by the parser.

    def on_message_begin(self) -> None:
        self._url = b""
        self._body = []
        self._body_bytes = 0
        self._expects = False

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(name) == 6 and name.lower() == b"expect":
            self._expects = value.lower() == b"100-continue"

    def on_headers_complete(self) -> None:
        if self._expects and not self._busy and not self._closing:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes <= MAX_BODY_BYTES:
            self._body.append(body)
        elif not self._closing:
            self._refuse(error(413, f"The body is over {MAX_BODY_BYTES} bytes.", "request_too_large"))

    def on_message_complete(self) -> None:
        if self._closing:
            return
        path = self._url.partition(b"?")[0]
        keep_alive = self._parser.should_keep_alive()
        self._pending.append((self._parser.get_method(), path, b"".join(self._body), keep_alive))
        self._body = []
        self._advance()

    # Answering.

    def _advance(self) -> None:
        # A call without latency is answered inside `_handle`, which leads back here.
        if self._advancing:
            return
        self._advancing = True
        try:
            while self._pending and not (self._busy or self._closing or self._write_paused):
                method, path, body, self._keep_alive = self._pending.popleft()
                self._busy = True
                self._handle(method, path, body)
        finally:
            self._advancing = False
        if self._read_paused and len(self._pending) <= MAX_PENDING and not self._closing:
            self._read_paused = False
            self._transport.resume_reading()

    def _handle(self, method: bytes, path: bytes, body: bytes) -> None:
        try:
            if method == b"POST" and path == b"/v1/chat/completions":
                prompt = read_chat(body)
            elif method == b"POST" and path == b"/v1/completions":
                prompt = read_completion(body)
            else:
                self._respond(route(self._model, method, path, body))
                return
        except BadRequest as fault:
            self._respond(error(400, str(fault), "invalid_request"))
            return
        call = self._model.submit(prompt, self._respond, self._peer, body)
        if not call.done:
            self._call = call

    def _respond(self, reply: Reply) -> None:
        self._call = None
        if self._closing:
            return
        match reply.delivery:
            case Delivery.WHOLE:
                self._transport.write(self._head(reply) + reply.body)
                self._answered()
            case Delivery.HALF:
                self._transport.write(self._head(reply) + reply.body[: len(reply.body) // 2])
                self._end()
            case Delivery.DRIP:
                self._transport.write(self._head(reply))
                self._drop_byte(reply, 0)
            case Delivery.DROP:
                self._end()
            case Delivery.RESET:
                sock = cast(socket.socket, self._transport.get_extra_info("socket"))
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
                self.close()

    def _answered(self) -> None:
        self._busy = False
        if self._keep_alive:
            self._advance()
        else:
            self._end()

    def _drop_byte(self, reply: Reply, at: int) -> None:
        if at == len(reply.body):
            self._answered()
            return
        self._transport.write(reply.body[at : at + 1])
        loop = asyncio.get_running_loop()
        self._drip = loop.call_later(reply.pause_s, self._drop_byte, reply, at + 1)

    def _refuse(self, reply: Reply) -> None:
        """Answer what cannot be read any further, and close."""
        self._keep_alive = False
        if not self._busy:
            self._transport.write(self._head(reply) + reply.body)
        self._end()

    def _end(self) -> None:
        self._closing = True
        self._transport.close()

    def _head(self, reply: Reply) -> bytes:
        return b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b%b\r\n" % (
            reply.status,
            _REASONS.get(reply.status, b"Simulated"),
            reply.content_type,
            len(reply.body),
            reply.headers,
            b"" if self._keep_alive else b"connection: close\r\n",
        )
