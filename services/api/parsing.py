"""The HTTP/1.1 parser: llhttp's, which declines every offer to change the protocol.

Java's and curl's clients offer HTTP/2 with their first request, one with a body too. llhttp stops where the
new protocol would begin; declining means to go on there as if nothing had been offered. What is left is then
read by a parser that has been told the framing of the body and nothing else.
"""

from __future__ import annotations

from typing import Any, Protocol

import httptools


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

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def feed_data(self, data: bytes) -> None:
        """Raises HttpParserError."""
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
