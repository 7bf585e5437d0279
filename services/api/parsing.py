"""The HTTP/1.1 parser: llhttp's, which declines every offer to change the protocol and takes any method.

A method llhttp does not know is no fault of the message: what may be done with a path, the application says.
So it is parsed under another name, where the request line comes in one piece.

Java's and curl's clients offer HTTP/2 with their first request, one with a body too. llhttp stops where the
new protocol would begin; declining means to go on there as if nothing had been offered. What is left is then
read by a parser that has been told the framing of the body and nothing else.
"""

from __future__ import annotations

import re
from typing import Any, Protocol

import httptools

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}"
_REQUEST_LINE = re.compile(rb"(?:\r?\n)*(" + _TOKEN + rb") [^ \r\n]+ HTTP/1\.[01]\r?\n")
_METHODS = frozenset({b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"CONNECT"})
_STAND_IN = b"PATCH"
"""Framed like any request that may have a body."""


class Reader(Protocol):
    """Whom the parser tells what it finds, with the headers of the request it is in."""

    headers: list[tuple[bytes, bytes]]

    def on_message_begin(self) -> None: ...
    def on_url(self, url: bytes) -> None: ...
    def on_header(self, name: bytes, value: bytes) -> None: ...
    def on_headers_complete(self) -> None: ...
    def on_body(self, body: bytes) -> None: ...
    def on_message_complete(self) -> None: ...


class Parser:
    """In the place of `httptools.HttpRequestParser`."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._parser = _parser(reader)
        self._method: bytes | None = None
        self.at_start = True
        """Whether the next byte is the first of a request; kept by the reader."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def feed_data(self, data: bytes) -> None:
        """Raises HttpParserError."""
        if self.at_start:
            data = self._understood(data)
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
                framing = framing_of(self._reader.headers)
                if framing:
                    self._parser = _parser(_Rest(self._reader))
                    self._parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n")
                else:
                    self._parser = _parser(self._reader)

    def get_method(self) -> bytes:
        """The method of the request whose headers are complete; asked once."""
        method, self._method = self._method, None
        return method or bytes(self._parser.get_method())

    def _understood(self, data: bytes) -> bytes:
        line = _REQUEST_LINE.match(data)
        if line is None or line[1] in _METHODS:
            return data
        self._method = line[1]
        return data[: line.start(1)] + _STAND_IN + data[line.end(1) :]

    @property
    def stops_early(self) -> bool:
        """Within `on_message_complete`: whether there is a body all the same, which comes yet."""
        return bool(self._parser.should_upgrade()) and bool(framing_of(self._reader.headers))


def framing_of(headers: list[tuple[bytes, bytes]]) -> bytes:
    """The header lines that say how long the body is; empty when there is none."""
    return b"".join(
        b"%s: %s\r\n" % (name, value)
        for name, value in headers
        if name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0"))
    )


class _Rest:
    """Passes on a body whose head is known, and then everything."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._through = False

    def on_message_begin(self) -> None:
        if self._through:
            self._reader.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._through:
            self._reader.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._through:
            self._reader.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._through:
            self._reader.on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._reader.on_body(body)

    def on_message_complete(self) -> None:
        self._through = True
        self._reader.on_message_complete()


def _parser(reader: Reader | _Rest) -> Any:
    parser = httptools.HttpRequestParser(reader)
    # Behind the last request of a connection more may come; it is not read.
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser
