"""What every request passes: its id, its key, its deadline, its error answer.

The outermost layer of the application. It answers 401 before anything is said about a path, hides batch and
file routes from callers who do not have them, turns refusals and failures into error bodies, and closes a
connection whose request body was not read to its end instead of swallowing the rest.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.exceptions import HTTPException

from schemas.settings import Http
from services.api import refusals
from services.api.cors import Cors
from services.api.counting import count_request
from services.api.incoming import BodyTooSlow
from services.api.principals import Principals, presented_key
from services.api.refusals import Refusal
from streams.blobs.port import is_full
from streams.kafka.messages import KafkaFailed

log = logging.getLogger("openrelay.api")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/health", "/openapi.json"})
BATCH_PATHS = ("/v1/files", "/v1/batches")
PUT_PATH = "/v1/uploads/"
"""Signed URLs: the signature is the key."""


class Gate:
    def __init__(
        self,
        app: App,
        principals: Principals,
        http: Http,
        cors: Cors,
        ready: Callable[[], bool],
        used: Callable[[str], None],
    ) -> None:
        """`used` is told the id of each key that was good."""
        self._app = app
        self._ready = ready
        self._used = used
        self._principals = principals
        self._http = http
        self._cors = cors

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{secrets.token_hex(16)}"
        body = _Body(receive, self._http)
        started_s = time.monotonic()
        started = False

        async def answer(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                _log(scope, message["status"], time.monotonic() - started_s, request_id)
                count_request(scope, message["status"], time.monotonic() - started_s)
                headers = message.setdefault("headers", [])
                headers.append((b"x-request-id", request_id.encode()))
                headers.extend(self._cors.headers(scope))
                if body.unread(scope) and not any(name.lower() == b"connection" for name, _ in headers):
                    headers.append((b"connection", b"close"))
            await send(message)

        try:
            if self._cors.is_preflight(scope):
                await _respond(answer, 204, {}, b"")
            else:
                self._admit(scope)
                scope["app"] = self  # makes the router raise its refusals instead of rendering them
                await self._app(scope, body.receive, answer)
        except Exception as error:
            if started:
                raise
            refusal = _refusal(error, request_id)
            headers = refusal.headers | {"content-type": "application/json"}
            await _respond(answer, refusal.status, headers, refusal.body())

    def _admit(self, scope: MutableMapping[str, Any]) -> None:
        path = scope["path"]
        if not self._ready():
            raise refusals.unavailable("The service is starting; try again in a moment.")
        if path in OPEN_PATHS or path.startswith(PUT_PATH):
            return
        principal = self._principals.authenticate(presented_key(dict(scope["headers"])))
        self._used(principal.key_id)
        if not principal.may_batch and path.startswith(BATCH_PATHS):
            raise refusals.not_found()
        scope.setdefault("state", {})["principal"] = principal


class _Body:
    """Receives with a deadline: a grace period, then at least the least rate on average."""

    def __init__(self, receive: Receive, http: Http) -> None:
        self._receive = receive
        self._http = http
        self._started_s = time.monotonic()
        self._received = 0
        self._complete = False

    def unread(self, scope: MutableMapping[str, Any]) -> bool:
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


def _log(scope: MutableMapping[str, Any], status: int, seconds: float, request_id: str) -> None:
    """One line a request. The query stays out: it may hold a signature."""
    log.info("%s %s %d %.3f s %s", scope["method"], scope["path"][:200], status, seconds, request_id)


def _refusal(error: Exception, request_id: str) -> Refusal:
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
        case OSError() if is_full(error):
            log.error("%s: the storage is full, free some space: %s", request_id, error)
            return refusals.unavailable()
    log.error("%s failed", request_id, exc_info=error)
    return Refusal(500, "Something went wrong here; it was logged.", code="internal_error")


async def _respond(send: Send, status: int, headers: dict[str, str], body: bytes) -> None:
    lines = [(name.encode(), value.encode()) for name, value in headers.items()]
    if status != 204:
        lines.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})
