"""A server that says exactly what a test wants on the wire, right or wrong, at whatever pace."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Asked(NamedTuple):
    """One request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Script = Callable[[Asked], Iterable[bytes | float]]
"""What to send, in pieces; a number is a pause in seconds."""


class RawServer:
    """A context manager. Every connection carries one request and is closed behind its answer."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.asked: list[Asked] = []
        self.connections = 0
        self._ending = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._threads: list[threading.Thread] = []
        self._open: set[socket.socket] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> RawServer:
        self._spawn(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)

    def _spawn(self, work: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._ending.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.add(connection)
            self._spawn(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(10)
            asked = _read(connection)
            if asked is not None:
                self.asked.append(asked)
                self._say(connection, asked)
        self._open.discard(connection)

    def _say(self, connection: socket.socket, asked: Asked) -> None:
        for piece in self._script(asked):
            if isinstance(piece, bytes):
                connection.sendall(piece)
            elif self._ending.wait(piece):
                return


def _read(connection: socket.socket) -> Asked | None:
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(65536)
        if not more:
            return None
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    while len(body) < int(headers.get("content-length", 0)):
        body += connection.recv(65536)
    return Asked(method, path, headers, body)


def answer(status: int, body: bytes = b"", media_type: str = "application/json", **headers: str) -> bytes:
    """A whole HTTP answer; underscores in the names of `headers` stand for hyphens."""
    lines = [f"HTTP/1.1 {status} Whatever", f"Content-Type: {media_type}", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + body


def stream(*events: bytes, media_type: str = "text/event-stream", **headers: str) -> bytes:
    """The start of an answer without a length, which ends with its connection, and the first events."""
    lines = ["HTTP/1.1 200 OK", f"Content-Type: {media_type}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    head = "\r\n".join([*lines, "Connection: close", "", ""]).encode()
    return head + b"".join(event(each) for each in events)


def event(data: bytes) -> bytes:
    return b"event: message\ndata: " + data + b"\n\n"
