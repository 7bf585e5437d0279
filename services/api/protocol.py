"""The HTTP/1.1 connection: uvicorn's, with the deadlines and bounds it lacks.

Headers must be complete within a time and a size; what frames a body in chunks stays in proportion to it; a
peer that does not read its answer is dropped; there is a most of open connections. What is not HTTP is
refused like anything else: behind the answers to the requests before it, and the connection ends with it. A
process that stops gives each connection one more answer, which says that it is the last. A connection that is
closed while the peer still sends is first shut for writing and drained for a moment, because closing it at
once makes the peer's kernel throw away the answer.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from schemas.settings import Http
from services.api.parsing import Parser
from services.api.refusals import Refusal

MAX_HEADER_BYTES = 64 * 1024
MAX_FRAMING_BYTES = 16 * 1024
FRAMING_PER_BYTE = 16
"""Bytes a body may take on the wire for each of its own, beyond `MAX_FRAMING_BYTES` and its trailers.

A chunk of one byte takes 6, and 13 where the sender pads the line of its size."""
STALLED_WRITE_S = 60.0
LINGER_S = 2.0
LINGER_BYTES = 4 * 1024 * 1024
_HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=:%\[\]-]*")
LAST_REQUEST_S = 1.0
"""When the process stops: how long a connection at rest may still send a request, whose answer ends it."""


class _Transport:
    """A transport whose `close` lingers while the peer may still be sending."""

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        still_sending: Callable[[], bool],
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._still_sending = still_sending
        self._lingering: asyncio.TimerHandle | None = None
        self._left = LINGER_BYTES

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @property
    def lingering(self) -> bool:
        return self._lingering is not None

    def is_closing(self) -> bool:
        return self.lingering or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        if not self._still_sending():
            self._transport.close()
            return
        self._lingering = self._loop.call_later(LINGER_S, self.abort)
        self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def abort(self) -> None:
        if self._lingering is not None:
            self._lingering.cancel()
        self._transport.abort()

    def discard(self, size: int) -> None:
        """Bytes that came while lingering."""
        self._left -= size
        if self._left < 0:
            self.abort()


class Connection(HttpToolsProtocol):
    http = Http()
    """Set by `bounded_by`."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._parsing = Parser(self)
        self.parser = self._parsing  # type: ignore[assignment]
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._rest_timer: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        self._in_headers = True
        self._begun = False
        """Whether a request's headers have come in part."""
        self._ended = False
        self._named_bytes = 0
        self._wire_bytes = 0
        """Of the present body, as it came; without those that came with its headers, which are few."""
        self._body_bytes = 0
        self._pieces: list[bytes] = []
        """Of the body, not passed on yet: one by one, small chunks would take the process for themselves."""
        self._fault: Refusal | None = None
        """What is wrong with the present request, where more can be said than that it is not valid."""
        self._refused = False
        self._last = False
        self._owed: Refusal | None = None
        """The last answer of this connection, when others come first."""
        self._lingering: _Transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._lingering = _Transport(transport, self.loop, self._still_sending)
        super().connection_made(self._lingering)  # type: ignore[arg-type]
        if len(self.connections) > self.http.max_connections:
            self._lingering.abort()
            return
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        if self._lingering.lingering:
            self._lingering.abort()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The peer sends no more; it may well wait for its answers."""
        if self._lingering.lingering:
            self._lingering.abort()
            return False
        self._ended = True
        if self._begun or (self._answering() and self.cycle.more_body):
            self._refuse(Refusal(400, "The request ended early."))
        elif self._answering():
            self.cycle.keep_alive = False
        return self._answering()

    def data_received(self, data: bytes) -> None:
        if self._lingering.lingering:
            self._lingering.discard(len(data))
            return
        if self._refused or self._owed is not None:
            return
        if self._in_headers:
            self._header_bytes += len(data)
        else:
            self._wire_bytes += len(data)
        super().data_received(data)
        self._pass_on()
        if self._in_body() and self._wire_bytes > self._wire_most() and not self.transport.is_closing():
            self._refuse(Refusal(400, "The body's chunks are far larger than what they carry."))
        if self._in_headers and self._header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._refuse(_headers_too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_headers()
        self._begun = True
        self._parsing.at_start = False

    def on_url(self, url: bytes) -> None:
        self._count_named(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_named(len(name) + len(value) + 4)
        if self._in_headers:  # what comes behind a body in chunks means nothing to us
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._check_host()
        self._check_coding()
        self._wire_bytes = self._body_bytes = 0
        self._in_headers = self._begun = False
        self._header_bytes = 0
        if self._header_timer is not None:
            self._header_timer.cancel()
        super().on_headers_complete()
        if self._last:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._pass_on()
        if not self._parsing.stops_early:
            super().on_message_complete()
            self._parsing.at_start = True

    def on_response_complete(self) -> None:
        last = not self.pipeline
        super().on_response_complete()
        if last and self._owed is not None and not self.transport.is_closing():
            self._answer(self._owed)

    def send_400_response(self, msg: str) -> None:
        self._pass_on()
        if self._named_bytes > MAX_HEADER_BYTES:
            self._refuse(_headers_too_large())
        else:
            self._refuse(self._fault or Refusal(400, "The request is not valid HTTP/1.1."))

    def shutdown(self) -> None:
        """The process stops. A connection at rest is not cut at once: a request may be on its way."""
        self._last = True
        if self._answering():
            self.cycle.keep_alive = False
        else:
            self._rest_timer = self.loop.call_later(LAST_REQUEST_S, self._rest_over)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(STALLED_WRITE_S, self._lingering.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def _count_named(self, size: int) -> None:
        """Ends the parsing of a request whose headers and trailers are too large."""
        self._named_bytes += size
        if self._named_bytes > MAX_HEADER_BYTES:
            raise ValueError

    def _check_host(self) -> None:
        """Ends the parsing of a request that does not say once, and well, whom it is for."""
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or not (hosts or self._parsing.get_http_version() == "1.0"):
            raise ValueError
        if hosts and _HOST.fullmatch(hosts[0]) is None:
            raise ValueError

    def _check_coding(self) -> None:
        """Ends the parsing of a request whose body is coded for its way as nobody decodes it here."""
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        if codings and b",".join(codings).strip().lower() != b"chunked":
            self._fault = Refusal(400, "The one Transfer-Encoding that is read here is chunked, alone.")
            raise ValueError

    def _pass_on(self) -> None:
        if self._pieces:
            body = b"".join(self._pieces)
            self._pieces.clear()
            self._body_bytes += len(body)
            super().on_body(body)

    def _in_body(self) -> bool:
        return not self._in_headers and not self._parsing.at_start

    def _wire_most(self) -> int:
        return MAX_FRAMING_BYTES + MAX_HEADER_BYTES + FRAMING_PER_BYTE * self._body_bytes

    def _rest_over(self) -> None:
        if not self._begun and not self._answering():
            self.transport.close()

    def _await_headers(self) -> None:
        self._in_headers = True
        self._named_bytes = 0
        if self._header_timer is not None:
            self._header_timer.cancel()
        self._header_timer = self.loop.call_later(self.http.header_timeout_s, self._headers_late)

    def _still_sending(self) -> bool:
        return not self._ended and (self._refused or (self.cycle is not None and self.cycle.more_body))

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _headers_late(self) -> None:
        if self.transport.is_closing():
            return
        if self._begun:
            self._refuse(Refusal(408, "The request headers did not arrive in time."))
        else:
            self._lingering.abort()

    def _refuse(self, refusal: Refusal) -> None:
        """Answer what the application cannot, and end the connection; in its turn, if others come first."""
        if self._refused or self._owed is not None or self.transport.is_closing():
            return
        if self._answering() and not self.cycle.more_body:
            self._owed = refusal
        elif self._answering() and self.pipeline:
            # The fault lies in the body of a request that waits: it is dropped.
            waiting, _ = self.pipeline.popleft()
            waiting.response_complete = True
            self._owed = refusal
        elif self._answering() and self.cycle.response_started:
            # It has been answered already, as far as it goes.
            self._refused = True
            self.cycle.keep_alive = False
        else:
            if self._answering():
                # The application, which waits for the rest of the body, hears that there is none.
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            self._answer(refusal)

    def _answer(self, refusal: Refusal) -> None:
        self._refused = True
        body = refusal.body()
        self.transport.write(
            STATUS_LINE[refusal.status]
            + b"content-type: application/json\r\nconnection: close\r\n"
            + b"x-request-id: req_%s\r\ncontent-length: %d\r\n\r\n"
            % (secrets.token_hex(16).encode(), len(body))
            + body
        )
        self.transport.close()

    def _stop_timers(self) -> None:
        for timer in (self._header_timer, self._write_timer, self._rest_timer):
            if timer is not None:
                timer.cancel()


def _headers_too_large() -> Refusal:
    return Refusal(431, f"The request headers are larger than {MAX_HEADER_BYTES:,} bytes.")


def bounded_by(http: Http) -> type[Connection]:
    """The connection class for these settings."""
    return type("BoundedConnection", (Connection,), {"http": http})
