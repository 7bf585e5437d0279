"""Kept connections that carry nothing but answers to what was asked on them.

HTTP/1.1 tells answers apart by their order alone: whatever a server or a proxy sends beyond the answer to one
request is the answer to the next one on that connection, and that is another record's, perhaps another
organization's. So a connection rests after each answer, and one on which anything came in that time, or has
come until it is used again, is closed instead. A server that has done it once gets a connection for each
request from then on, since what it sends later still could not be told from an answer.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from time import monotonic
from typing import Any

from aiohttp import TCPConnector
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ConnectionKey
from aiohttp.connector import Connection
from aiohttp.tracing import Trace

REST_S = 0.1
"""A second answer comes at once or after a retry of a proxy's; a tenth of a second costs a tenth of the
requests a second in connections more."""

MOST_DISTRUSTED = 10_000
"""Customers name hosts; this many are remembered."""

_SHUT = getattr(select, "POLLRDHUP", 0)
"""Linux alone tells of half a close."""

_ANYTHING = select.POLLIN | select.POLLPRI | _SHUT
_CLOSED = _SHUT | select.POLLHUP | select.POLLERR | select.POLLNVAL


def unheard(host: str) -> None:
    """Nobody is told."""


class Connector(TCPConnector):
    """Takes the options of aiohttp's, but for limits. `on_surplus` is called once for a host and port."""

    def __init__(
        self, *, keepalive_timeout: float, on_surplus: Callable[[str], None] = unheard, **options: Any
    ) -> None:
        super().__init__(limit=0, keepalive_timeout=keepalive_timeout, **options)
        self._keep_s = keepalive_timeout
        self._on_surplus = on_surplus
        self._distrusted: dict[ConnectionKey, None] = {}

    async def _get(self, key: ConnectionKey, traces: list[Trace]) -> Connection | None:
        """In place of aiohttp's, which looks only whether a kept connection is open and not too old.

        The first of the queue has rested longest.
        """
        kept = self._conns.get(key)
        while kept and (age_s := monotonic() - kept[0][1]) >= REST_S:
            protocol, _ = kept.popleft()
            if not kept:
                del self._conns[key]
            if self._usable(key, protocol, age_s):
                self._acquired.add(protocol)
                return Connection(self, key, protocol, self._loop)
            protocol.abort()
        return None

    def _usable(self, key: ConnectionKey, protocol: ResponseHandler, age_s: float) -> bool:
        if not protocol.is_connected() or age_s > self._keep_s:
            return False
        if protocol.should_close:
            self._distrust(key)
            return False
        events = _unread(protocol)
        if events and not events & _CLOSED and not key.is_ssl:
            # Under TLS it may as well be a message of the protocol's own.
            self._distrust(key)
        return not events and key not in self._distrusted

    def _distrust(self, key: ConnectionKey) -> None:
        if key in self._distrusted:
            return
        if len(self._distrusted) >= MOST_DISTRUSTED:
            del self._distrusted[next(iter(self._distrusted))]
        self._distrusted[key] = None
        self._on_surplus(f"{key.host}:{key.port}")


def _unread(protocol: ResponseHandler) -> int:
    """What the kernel has for a connection that the loop has not read yet, as events of `poll`."""
    assert protocol.transport is not None, "it is connected"
    poll = select.poll()  # select takes no descriptor over 1023
    poll.register(protocol.transport.get_extra_info("socket").fileno(), _ANYTHING)
    return next((events for _, events in poll.poll(0)), 0)
