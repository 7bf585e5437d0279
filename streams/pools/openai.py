"""Calls to OpenAI-compatible model servers.

Over aiohttp itself: a whole dispatch loop costs 0.2 CPU ms a record with it and 0.5 with httpx on top
(measured), and this is the one place where that matters. Client timeouts are per read, so each call is
bounded as a whole. Answers are taken uncompressed and up to a size, so that no server can fill the memory.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC
from email.utils import parsedate_to_datetime

import aiohttp
import structlog

from streams.connections import Connector
from streams.core.judge import Broken, Outcome, Reply, TimedOut, Unreachable
from streams.core.load import Load, parse
from streams.pools import places
from streams.pools.endpoint import Endpoint

MAX_ANSWER_BYTES = 32 * 1024 * 1024
PART_BYTES = 256 * 1024
"""Of a large body, so much is written at once."""
CONNECT_TIMEOUT_S = 10.0
PROBE_TIMEOUT_S = 5.0
MAX_METRICS_BYTES = 4 * 1024 * 1024
KEEP_ALIVE_S = 3.0
"""Shorter than servers keep idle connections (uvicorn 5 s), so that we do not send into one just closed."""
MAX_RETRY_AFTER_S = 3_600.0

_NOT_HTTP = "what the model server sent is not HTTP"
_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_SECONDS = re.compile(r"[0-9]+(\.[0-9]*)?", re.ASCII)
_HEADERS = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}

log = structlog.get_logger("openrelay.dispatch")


class LargeBody:
    """A request body that is sent once and forgotten when it is; `on_sent` is called then."""

    def __init__(self, body: bytes, on_sent: Callable[[], None]) -> None:
        self.size = len(body)
        self._body = body
        self._on_sent = on_sent

    async def parts(self) -> AsyncIterator[bytes]:
        for at in range(0, self.size, PART_BYTES):
            yield self._body[at : at + PART_BYTES]
        self._body = b""
        self._on_sent()


async def any_size(size: int) -> None:
    """Room for whatever a server answers, up to the limit."""


class OpenAIClient:
    """One connection pool for all endpoints of a process. Construct it inside the running loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._session = aiohttp.ClientSession(
            connector=Connector(keepalive_timeout=KEEP_ALIVE_S, on_surplus=_warn),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            auto_decompress=False,
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent",),
            headers=_HEADERS,
        )
        self._calls: dict[Endpoint, set[asyncio.Timeout]] = {}
        self._given_up: set[asyncio.Timeout] = set()

    async def close(self) -> None:
        await self._session.close()

    def give_up(self, endpoint: Endpoint) -> None:
        """The server is sick: end the calls that run there, as broken."""
        now = self._loop.time()
        for scope in self._calls.get(endpoint, ()):
            if not scope.expired():
                self._given_up.add(scope)
                scope.reschedule(now)

    async def call(
        self,
        endpoint: Endpoint,
        route: str,
        body: bytes | LargeBody,
        *,
        timeout_s: float,
        free_bytes: int = 0,
        room: Callable[[int], Awaitable[None]] = any_size,
    ) -> Outcome:
        """POST `body` to `route` (`/v1/…`); never raises for what a server or network does.

        Of an answer over `free_bytes` no more is read than `room` has been awaited for, in bytes.
        """
        if fault := places.fault(endpoint.base_url, endpoint.pool.api_key):
            return Unreachable(fault)
        headers = endpoint.headers
        if isinstance(body, LargeBody):
            headers = {**headers, "Content-Length": str(body.size)}
        url = endpoint.base_url + route.removeprefix("/v1")
        scope = asyncio.Timeout(self._loop.time() + timeout_s)
        running = self._calls.setdefault(endpoint, set())
        running.add(scope)
        try:
            async with (
                scope,
                self._session.post(
                    url,
                    data=body.parts() if isinstance(body, LargeBody) else body,
                    headers=headers,
                    allow_redirects=False,
                ) as response,
            ):
                answer = await _read_capped(response, free_bytes, room)
                if answer is None:
                    return Broken(f"the answer is over {MAX_ANSWER_BYTES} bytes")
                if not 200 <= response.status < 600:
                    return Broken(_NOT_HTTP)
                return Reply(
                    response.status,
                    answer,
                    _request_id(response.headers.get("x-request-id")),
                    retry_after_s(
                        response.headers.get("Retry-After"), response.headers.get("Date"), time.time()
                    ),
                )
        except TimeoutError as error:
            if isinstance(error, aiohttp.ConnectionTimeoutError):
                return Unreachable(f"connecting took over {CONNECT_TIMEOUT_S} s")
            return Broken("the server's health is gone") if scope in self._given_up else TimedOut()
        except aiohttp.ClientConnectorError as error:
            return Unreachable(str(error))
        except aiohttp.InvalidURL:  # it says the URL, and that may hold a password
            return Unreachable("its base_url is not one")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Broken(_what_broke(error))
        finally:
            running.discard(scope)
            self._given_up.discard(scope)

    async def healthy(self, endpoint: Endpoint) -> bool:
        """Whether `/health` answers; a server without it (404) is not sick."""
        status = await self._probe(f"{_root(endpoint)}/health", endpoint)
        return status is not None and status < 500

    async def load(self, endpoint: Endpoint) -> Load | None:
        """What the server's `/metrics` says of its load; None when it has none we know."""
        text = bytearray()
        if await self._probe(f"{_root(endpoint)}/metrics", endpoint, text) != 200:
            return None
        return parse(text.decode("utf-8", errors="replace"))

    async def key_accepted(self, endpoint: Endpoint) -> bool:
        """Whether the server takes our key for its list of models."""
        return await self._probe(f"{endpoint.base_url}/models", endpoint) == 200

    async def lists_no_models(self, endpoint: Endpoint) -> bool:
        """Whether the server has no list of models where it should be."""
        return await self._probe(f"{endpoint.base_url}/models", endpoint) == 404

    async def _probe(self, url: str, endpoint: Endpoint, body: bytearray | None = None) -> int | None:
        """The status of the answer, which is read into `body`; None when none came or it is too long."""
        if places.fault(endpoint.base_url, endpoint.pool.api_key):
            return None
        try:
            async with (
                asyncio.timeout(PROBE_TIMEOUT_S),
                self._session.get(url, headers=endpoint.headers, allow_redirects=False) as response,
            ):
                if body is None:
                    return response.status
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > MAX_METRICS_BYTES:
                        response.close()
                        return None
                return response.status
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            return None


def _root(endpoint: Endpoint) -> str:
    """Where a server has what is not OpenAI's."""
    return endpoint.base_url.removesuffix("/v1")


def _request_id(said: str | None) -> str | None:
    """The server's id of the call, if it is one that can be shown and written anywhere."""
    return said if said is not None and _REQUEST_ID.fullmatch(said) else None


def _warn(address: str) -> None:
    log.warning(
        "endpoint sent more than it was asked for",
        endpoint=address,
        consequence="one call a connection until a restart",
    )


def _what_broke(error: Exception) -> str:
    """For the record's error line: what happened, in words that do not depend on our libraries."""
    match error:
        case aiohttp.ServerDisconnectedError():
            return "the model server closed the connection before it had answered"
        case aiohttp.ClientPayloadError():
            return "the connection to the model server broke in the middle of the answer"
        case OSError(errno=int(number)):
            return f"the connection to the model server broke: {os.strerror(number)}"
        case aiohttp.ClientResponseError() | ValueError():
            return _NOT_HTTP
    return "the connection to the model server broke"


async def _read_capped(
    response: aiohttp.ClientResponse, free_bytes: int, room: Callable[[int], Awaitable[None]]
) -> bytes | None:
    chunks: list[bytes] = []
    size, may_be = 0, free_bytes
    announced = response.content_length or 0
    async for chunk in response.content.iter_any():
        size += len(chunk)
        if max(size, announced) > MAX_ANSWER_BYTES:
            response.close()
            return None
        if size > may_be:
            more = max(size, announced) - may_be
            await room(more)
            may_be += more
        chunks.append(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def retry_after_s(value: str | None, date: str | None, now_s: float) -> float | None:
    """How long a server asks us to wait, by its headers Retry-After and Date; None when it says nothing.

    A date counts from the server's own, which its clock has in common with it. Longer than MAX_RETRY_AFTER_S
    is no answer about load any more; it is asked again then.
    """
    if value is None:
        return None
    if _SECONDS.fullmatch(value.strip()):
        return min(float(value), MAX_RETRY_AFTER_S)
    until_s = _http_date(value)
    if until_s is None:
        return None
    said_s = None if date is None else _http_date(date)
    return max(0.0, min(until_s - (now_s if said_s is None else said_s), MAX_RETRY_AFTER_S))


def _http_date(text: str) -> float | None:
    """Unix seconds."""
    try:
        date = parsedate_to_datetime(text)
        return (date if date.tzinfo is not None else date.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
