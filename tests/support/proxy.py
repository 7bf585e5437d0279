"""A TCP proxy that can become the network between two processes at its worst."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

CHUNK = 256 * 1024
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER that makes a close a reset."""


class Proxy:
    """Forwards to a port of this machine from `port`; a context manager.

    `silence`: connections stay open and nothing passes either way, as when cables are cut; what was under
    way arrives after `heal`. `refuse`: all connections are reset, and new ones too. `swallow`: what is sent
    arrives, and its answer resets the connection instead.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        self._passes = threading.Event()
        self._passes.set()
        self._refuses = False
        self._swallows = False
        self._ending = False
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Proxy:
        self._spawn(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._ending = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._reset_all()
        self._passes.set()
        for thread in self._threads:
            thread.join(10)

    def silence(self) -> None:
        self._passes.clear()

    def refuse(self) -> None:
        self._refuses = True
        self._reset_all()

    def swallow(self) -> None:
        self._swallows = True

    def heal(self) -> None:
        self._refuses = self._swallows = False
        self._passes.set()

    def _spawn(self, work: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._ending:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self._spawn(self._connect, near)

    def _connect(self, near: socket.socket) -> None:
        with self._lock:
            self._open.add(near)
        self._passes.wait()
        far = None
        if not self._refuses and not self._ending:
            with contextlib.suppress(OSError):
                far = socket.create_connection(("127.0.0.1", self._target))
        if far is None:
            self._reset(near)
            return
        with self._lock:
            self._open.add(far)
        if self._refuses:
            self._reset_all()
        self._spawn(self._forward, far, near, True)
        self._forward(near, far, False)

    def _forward(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while (data := source.recv(CHUNK)) and not (answers and self._swallows):
                self._passes.wait()
                sink.sendall(data)
        self._passes.wait()
        self._reset(source)
        self._reset(sink)

    def _reset_all(self) -> None:
        with self._lock:
            found = list(self._open)
        for each in found:
            self._reset(each)

    def _reset(self, connection: socket.socket) -> None:
        with self._lock:
            if connection not in self._open:
                return
            self._open.discard(connection)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()
