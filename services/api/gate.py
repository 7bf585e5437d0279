"""What every request of the inference host passes: its key, its line in the log, its count.

The outermost layer of the application, around an exchange. It answers 401 before anything is said about a
path, and hides batch and file routes from callers who do not have them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from schemas.settings import Http
from services.api import refusals
from services.api.cors import Cors
from services.api.counting import count_request
from services.api.exchange import App, Receive, Scope, Send, exchange, respond
from services.api.principals import Principals, presented_key

log = logging.getLogger("openrelay.api")

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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        await exchange(self._admitted, scope, receive, send, self._http, log, partial(self._begun, scope))

    async def _admitted(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._cors.is_preflight(scope):
            await respond(send, 204, {}, b"")
            return
        self._admit(scope)
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> None:
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

    def _begun(self, scope: Scope, status: int, seconds: float, request_id: str) -> list[tuple[bytes, bytes]]:
        """One line a request. The query stays out: it may hold a signature."""
        log.info("%s %s %d %.3f s %s", scope["method"], scope["path"][:200], status, seconds, request_id)
        count_request(scope, status, seconds)
        return self._cors.headers(scope)
