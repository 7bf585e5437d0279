"""One request and its answer, on either host: an id, a deadline for the body, an error answer.

A connection whose request body was not read to its end is closed behind the answer instead of swallowing the
rest. What the application raises becomes the answer.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from starlette.exceptions import HTTPException

from schemas.settings import Http
from services.api import refusals
from services.api.incoming import BodyTooSlow
from services.api.refusals import Refusal
from streams.blobs import why_failed
from streams.kafka.messages import KafkaFailed

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Begun = Callable[[int, float, str], Iterable[tuple[bytes, bytes]]]
"""Told the status of an answer, the seconds it took to begin and the request's id; gives further headers."""


async def exchange(
    app: App, scope: Scope, receive: Receive, send: Send, http: Http, log: logging.Logger, begun: Begun
) -> None:
    """Have `app` answer. Raises what it raises once its answer has begun."""
    request_id = f"req_{secrets.token_hex(16)}"
    body = _Body(receive, http)
    started_s = time.monotonic()
    started = False

    async def answer(message: Message) -> None:
        nonlocal started
        if message["type"] == "http.response.start":
            started = True
            headers = message.setdefault("headers", [])
            headers.append((b"x-request-id", request_id.encode()))
            headers.extend(begun(message["status"], time.monotonic() - started_s, request_id))
            if body.unread(scope) and not any(name.lower() == b"connection" for name, _ in headers):
                headers.append((b"connection", b"close"))
        await send(message)

    scope["app"] = app  # makes the router raise its refusals instead of rendering them
    try:
        await app(scope, body.receive, answer)
    except Exception as error:
        if started:
            raise
        refusal = _refusal(error, request_id, log)
        headers = refusal.headers | {"content-type": "application/json"}
        await respond(answer, refusal.status, headers, refusal.body())


async def respond(send: Send, status: int, headers: dict[str, str], body: bytes) -> None:
    lines = [(name.encode(), value.encode()) for name, value in headers.items()]
    if status != 204:
        lines.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})


class _Body:
    """Receives with a deadline: a grace period, then at least the least rate on average."""

    def __init__(self, receive: Receive, http: Http) -> None:
        self._receive = receive
        self._http = http
        self._started_s = time.monotonic()
        self._received = 0
        self._complete = False

    def unread(self, scope: Scope) -> bool:
        """Whether the request has a body of which something is still to come."""
        if self._complete:
            return False
        headers = dict(scope["headers"])
        return headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers

    async def receive(self) -> Message:
        if self._complete:
            return await self._receive()
        allowed_s = self._http.body_grace_s + self._received / self._http.min_body_bytes_per_s
        try:
            async with asyncio.timeout(self._started_s + allowed_s - time.monotonic()):
                message = await self._receive()
        except TimeoutError:
            raise BodyTooSlow from None
        self._received += len(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        return message


def _refusal(error: Exception, request_id: str, log: logging.Logger) -> Refusal:
    match error:
        case Refusal():
            return error
        case HTTPException(status_code=405):
            return refusals.method_not_allowed(error.headers)
        case HTTPException():
            return refusals.not_found()
        case KafkaFailed():
            log.warning("%s: %s", request_id, error)
            return refusals.unavailable()
        case _ if (why := why_failed(error)) is not None:
            log.error("%s: %s", request_id, why)
            return refusals.unavailable()
    log.error("%s failed", request_id, exc_info=error)
    return Refusal(500, "Something went wrong here; it was logged.", code="internal_error")
