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
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from schemas.settings import Egress as EgressSettings
from streams.core.addresses import AddressPolicy

MAX_ANSWER_BYTES = 8 * 1024 * 1024
KEEP_ALIVE_S = 1.5
"""Shorter than servers keep idle connections: a request sent into a closed one is not repeated."""

PER_HOST = 256
PER_ORGANIZATION = 512
"""Requests at once; further ones wait, and their deadline begins when their turn comes."""

RESOLVERS = 16
"""Threads for names, apart from all others, so that a slow name server delays nobody else."""

_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "openrelay-batch"}


class EgressFailed(Exception):
    """No whole answer came; the text names no URL."""


class AddressRefused(OSError):
    """The address is not one that customers may have us connect to."""


class Reply:
    """An answer whose body may still be under way."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status

    def header(self, name: str) -> str | None:
        return self._response.headers.get(name)

    @property
    def media_type(self) -> str:
        return self._response.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Raises EgressFailed when it is too long, or compressed."""
        if self._response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise EgressFailed("the answer is compressed")
        size = 0
        async for chunk in self._response.content.iter_any():
            size += len(chunk)
            if size > MAX_ANSWER_BYTES:
                raise EgressFailed(f"the answer is over {MAX_ANSWER_BYTES} bytes")
            yield chunk

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks()])


class Egress:
    """For one event loop. Close it when nothing is under way any more."""

    def __init__(self, settings: EgressSettings) -> None:
        self.configure(settings)
        self._resolver = _Resolver()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,
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
        self._organizations = Places(PER_ORGANIZATION)

    def configure(self, settings: EgressSettings) -> None:
        self._policy = AddressPolicy(settings.allow_cidrs)
        self._allow_http = settings.allow_http

    async def close(self) -> None:
        await self._session.close()
        await self._resolver.close()

    @asynccontextmanager
    async def place(self, url: str, organization: str) -> AsyncIterator[None]:
        """Hold a place for requests to this host, for this organization; waits until there is one."""
        async with self._organizations.of(organization), self._hosts.of(_host(url)):
            yield

    @asynccontextmanager
    async def request(
        self, method: str, url: str, *, headers: Mapping[str, str], body: bytes | None, timeout_s: float
    ) -> AsyncIterator[Reply]:
        """One request; the deadline covers all that is done with the reply too. Raises EgressFailed."""
        try:
            target = URL(url, encoded=True)
            if target.scheme != "https" and not (self._allow_http and target.scheme == "http"):
                raise EgressFailed("the URL is not https")
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(
                    method, target, data=body, headers=headers, allow_redirects=False
                ) as response,
            ):
                yield Reply(response)
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

    async def post(
        self, url: str, body: bytes, *, headers: Mapping[str, str], timeout_s: float
    ) -> tuple[int, bytes]:
        """POST, and the status and body of the answer. Raises EgressFailed."""
        async with self.request("POST", url, headers=headers, body=body, timeout_s=timeout_s) as reply:
            return reply.status, await reply.read()

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
    async def of(self, key: str) -> AsyncIterator[None]:
        semaphore, users = self._known.setdefault(key, (asyncio.Semaphore(self._most), [0]))
        users[0] += 1
        try:
            async with semaphore:
                yield
        finally:
            users[0] -= 1
            if not users[0]:
                del self._known[key]


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
