"""The client for everything customers name: tools, MCP servers, callbacks, webhooks.

Nobody can use it to reach what only we can reach: the address of every connection is checked when the socket
is made, after all resolving, so neither a name that changes its mind nor an odd spelling gets through. One
deadline covers a request from connecting to its last byte, an answer has a bounded size, redirects are not
followed, nothing is decompressed, and no proxy, cookie or credential of this machine takes part.

Over aiohttp: httpx's own pool needs time in proportion to the requests that wait, for each of them, and a
thousand slow tools are an ordinary day.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from schemas.settings import Egress as EgressSettings
from streams.connections import Connector
from streams.core.addresses import AddressPolicy

MAX_ANSWER_BYTES = 8 * 1024 * 1024
KEEP_ALIVE_S = 1.5
"""Shorter than servers keep idle connections: a request sent into a closed one is not repeated."""

PER_HOST = 256
PER_ORGANIZATION = 512
PER_HOST_AND_ORGANIZATION = PER_HOST * 3 // 4
"""Requests at once; further ones wait, and their deadline begins when their turn comes. One organization
never has all the places at a host that others may use as well."""

LARGE_ANSWER = 64 * 1024
"""Bytes over which an answer is taken apart in a thread."""

AT_ONCE = 2
"""Large answers taken apart at once: parsed, one may be many times its size."""

RESOLVERS = 16
"""Threads for names, apart from all others, so that a slow name server delays nobody else."""

LAST_S = 2.0
"""Given to requests that nobody waits for when the client is closed."""

T = TypeVar("T")

_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "openrelay-batch"}


class EgressFailed(Exception):
    """No whole answer came; the text names no URL."""


class AnswerRefused(EgressFailed):
    """An answer came, and is none we read: asked again, the server would give it again."""


class AddressRefused(OSError):
    """The address is not one that customers may have us connect to."""


class Room(Protocol):
    """The memory an answer is read into."""

    def take(self, size: int) -> bool:
        """Take so much, if it is free now."""

    async def wait(self, size: int) -> None:
        """Take so much as soon as it is free."""

    def give(self, size: int) -> None:
        """Give so much back."""


class Reply:
    """An answer whose body may still be under way."""

    def __init__(
        self, response: aiohttp.ClientResponse, deadline: asyncio.Timeout, room: Room | None
    ) -> None:
        self._response = response
        self._deadline = deadline
        self._room = room
        self.status = response.status
        self.size = 0
        """Bytes read so far."""

    def header(self, name: str) -> str | None:
        return self._response.headers.get(name)

    @property
    def media_type(self) -> str:
        return self._response.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Raises AnswerRefused when it is too long, or compressed."""
        if self._response.headers.get("Content-Encoding", "").strip().lower() not in ("", "identity"):
            raise AnswerRefused("the answer is compressed")
        async for chunk in self._response.content.iter_any():
            if self.size + len(chunk) > MAX_ANSWER_BYTES:
                raise AnswerRefused(f"the answer is over {MAX_ANSWER_BYTES} bytes")
            if self._room is not None and not self._room.take(len(chunk)):
                await self._wait(self._room, len(chunk))
            self.size += len(chunk)
            yield chunk
        if self._room is not None and not self._room.take(0):
            await self._wait(self._room, 0)

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks()])

    def hurry(self, within_s: float) -> None:
        """Give the rest of the answer no more than so long."""
        ends, latest = self._deadline.when(), asyncio.get_running_loop().time() + within_s
        if ends is None or ends > latest:
            self._deadline.reschedule(latest)

    async def _wait(self, room: Room, size: int) -> None:
        """Wait for room. The server is not to blame for it: its deadline waits too."""
        loop, ends = asyncio.get_running_loop(), self._deadline.when()
        assert ends is not None, "a request has a deadline"
        began = loop.time()
        self._deadline.reschedule(None)
        try:
            await room.wait(size)
        finally:
            self._deadline.reschedule(ends + loop.time() - began)


class Egress:
    """For one event loop. Close it when nothing is under way any more."""

    def __init__(self, settings: EgressSettings) -> None:
        self.configure(settings)
        self._resolver = _Resolver()
        self._session = aiohttp.ClientSession(
            connector=Connector(
                keepalive_timeout=KEEP_ALIVE_S,
                resolver=self._resolver,
                ssl=ssl.create_default_context(),
                socket_factory=self._socket,
            ),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=_HEADERS,
        )
        self._hosts = Places(PER_HOST)
        self._parts = Places(PER_HOST_AND_ORGANIZATION)
        self._organizations = Places(PER_ORGANIZATION)
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self._left: set[asyncio.Task[None]] = set()

    def configure(self, settings: EgressSettings) -> None:
        self._policy = AddressPolicy(settings.allow_cidrs)
        self._allow_http = settings.allow_http

    async def close(self) -> None:
        if self._left:
            await asyncio.wait(self._left, timeout=LAST_S)
        for task in self._left:
            task.cancel()
        await asyncio.gather(*self._left, return_exceptions=True)
        await self._session.close()
        await self._resolver.close()

    @asynccontextmanager
    async def place(
        self, url: str, organization: str, let_past: asyncio.Event | None = None
    ) -> AsyncIterator[None]:
        """Hold a place for requests to this host, for this organization; waits until there is one.

        Or goes on without when `let_past` is set, or has been: others may hold their places until it has.
        """
        host = _host(url)
        async with (
            self._organizations.of(organization, let_past),
            self._parts.of(f"{organization} {host}", let_past),
            self._hosts.of(host, let_past),
        ):
            yield

    def leave(self, request: Coroutine[Any, Any, None]) -> None:
        """Have a request made that nobody waits for. It handles what can go wrong, and ends soon."""
        task = asyncio.get_running_loop().create_task(request)
        self._left.add(task)
        task.add_done_callback(self._left.discard)

    async def take_apart(self, read: Callable[[bytes], T], answer: bytes) -> T:
        """What `read` makes of an answer; of a large one in a thread, and of few of those at once."""
        if len(answer) <= LARGE_ANSWER:
            return read(answer)
        async with self._at_once:
            return await asyncio.to_thread(read, answer)

    @asynccontextmanager
    async def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout_s: float,
        room: Room | None = None,
    ) -> AsyncIterator[Reply]:
        """One request; the deadline covers all that is done with the reply too. Raises EgressFailed.

        What is read of the reply is taken from `room`, and given back only when the request fails.
        """
        reply = None
        try:
            target = URL(url, encoded=True)
            if target.scheme != "https" and not (self._allow_http and target.scheme == "http"):
                raise EgressFailed("the URL is not https")
            async with (
                asyncio.timeout(timeout_s) as deadline,
                self._session.request(
                    method, target, data=body, headers=headers, allow_redirects=False
                ) as response,
            ):
                reply = Reply(response, deadline, room)
                yield reply
                reply = None
        except TimeoutError:
            raise EgressFailed(f"no whole answer within {timeout_s:g} s") from None
        except aiohttp.ClientConnectorDNSError:
            raise EgressFailed("the host's name cannot be resolved") from None
        except aiohttp.ClientSSLError:
            raise EgressFailed("the host's TLS certificate or protocol was not accepted") from None
        except aiohttp.ClientConnectorError as error:
            if isinstance(error.os_error, AddressRefused):
                raise EgressFailed("the host has no public address") from None
            raise EgressFailed("no connection could be opened") from None
        except (aiohttp.ClientError, OSError, ValueError):
            raise EgressFailed("the connection broke, or what came was not HTTP") from None
        finally:
            if reply is not None and room is not None:
                room.give(reply.size)

    async def post(
        self,
        url: str,
        body: bytes,
        *,
        headers: Mapping[str, str],
        timeout_s: float,
        room: Room | None = None,
    ) -> tuple[int, bytes]:
        """POST; the status of the answer, and its body if that is 2xx: of others nobody reads it.

        Raises EgressFailed.
        """
        async with self.request(
            "POST", url, headers=headers, body=body, timeout_s=timeout_s, room=room
        ) as reply:
            return reply.status, await reply.read() if 200 <= reply.status < 300 else b""

    def _socket(self, address: tuple[Any, ...]) -> socket.socket:
        """In place of `socket.socket`, the moment before `connect`: the check nothing comes after."""
        family, kind, protocol, _, where = address
        if family not in (socket.AF_INET, socket.AF_INET6) or not self._policy.permits(str(where[0])):
            raise AddressRefused("not a public address")
        return socket.socket(family, kind, protocol)


class Places:
    """At most so many holders of each key at once, first come first served."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[str, tuple[asyncio.Semaphore, list[int]]] = {}

    @asynccontextmanager
    async def of(self, key: str, let_past: asyncio.Event | None = None) -> AsyncIterator[None]:
        semaphore, users = self._known.setdefault(key, (asyncio.Semaphore(self._most), [0]))
        users[0] += 1
        held = False
        try:
            if let_past is None or not semaphore.locked():
                held = await semaphore.acquire()
            else:
                held = await _unless(let_past, semaphore)
            yield
        finally:
            if held:
                semaphore.release()
            users[0] -= 1
            if not users[0]:
                del self._known[key]


async def _unless(let_past: asyncio.Event, semaphore: asyncio.Semaphore) -> bool:
    """Wait for the semaphore, or until `let_past`; whether it was acquired."""
    acquiring = asyncio.ensure_future(semaphore.acquire())
    passing = asyncio.ensure_future(let_past.wait())
    try:
        await asyncio.wait({acquiring, passing}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        if acquiring.done():
            semaphore.release()
        raise
    finally:
        passing.cancel()
        if not acquiring.done():
            acquiring.cancel()
    return acquiring.done()


class _Resolver(AbstractResolver):
    """getaddrinfo in threads of its own."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(RESOLVERS, thread_name_prefix="names")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
        )
        return [
            ResolveResult(
                hostname=host,
                host=str(where[0]),
                port=int(where[1]),
                family=kind,
                proto=protocol,
                flags=socket.AI_NUMERICHOST,
            )
            for kind, _, protocol, _, where in found
            if kind in (socket.AF_INET, socket.AF_INET6)
        ]

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _host(url: str) -> str:
    """Host and port, as the key of a place."""
    return url.partition("://")[2].partition("/")[0].partition("?")[0].lower()
