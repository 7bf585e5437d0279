"""Requests and answers as bytes, for what no client library would send."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import msgspec

from tests.api.host import ACME


class Raw:
    """A connection on which bytes are sent as they are."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)

    def send(self, *parts: bytes) -> None:
        self.socket.sendall(b"".join(parts))

    def read(self) -> bytes:
        """Everything up to the end of the connection."""
        parts = []
        with contextlib.suppress(ConnectionResetError):
            while part := self.socket.recv(65_536):
                parts.append(part)
        return b"".join(parts)


def head(method: str, path: str, *lines: str) -> bytes:
    fixed = [f"{method} {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {ACME}"]
    return "\r\n".join([*fixed, *lines, "", ""]).encode()


def refused(answer: bytes, status: int, code: str | None = None) -> None:
    """One complete answer with our error shape, and the connection closed behind it."""
    top, _, body = answer.partition(b"\r\n\r\n")
    lines = top.decode().lower().split("\r\n")
    assert lines[0].startswith(f"http/1.1 {status} "), answer
    assert "connection: close" in lines
    assert any(line.startswith("x-request-id: req_") for line in lines)
    assert msgspec.json.decode(body)["error"]["code"] == code


def drip(raw: Raw, data: bytes, every_s: float) -> None:
    """Send byte by byte in a thread until the peer has had enough."""

    def send() -> None:
        with contextlib.suppress(OSError):
            for byte in data:
                raw.send(bytes([byte]))
                time.sleep(every_s)

    threading.Thread(target=send, daemon=True).start()
