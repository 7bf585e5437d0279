"""The control host's routes: usage, prices, lag, keys, metrics and the dashboard. It serves no file or batch.

A batch or file route answers 404 before any key is looked at, everything else 401 before 404. `/health`,
`/metrics` and `/openapi.json` need no key: they say nothing about any organization.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import msgspec
from clickhouse_connect.driver.exceptions import ClickHouseError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route, Router

from schemas.settings import Settings
from services.api.exchange import App, Receive, Scope, Send, exchange
from services.api.principals import Principals
from services.api.refusals import Refusal, unavailable
from services.control import prices, sampling, usage
from services.control.board import Board
from services.control.callers import authenticate, operators_only, whose_batches, whose_usage
from services.control.lag import PartitionLag, by_topic, partition_lags
from services.control.openapi import KeyList, LagList, PriceList, UsageList, description
from services.control.overview import overview
from services.control.page import HEADERS, page
from services.control.shown import Everything, ask, own_process
from services.operator import keys
from services.process import signal_ready
from streams import metrics as catalogue
from streams.kafka.admin import Admin
from streams.kafka.messages import KafkaFailed

INFERENCE_ROUTES = (
    "/v1/files",
    "/v1/uploads",
    "/v1/batches",
    "/v1/chat",
    "/v1/completions",
    "/v1/models",
)
OPEN_PATHS = frozenset({"/health", "/metrics", "/openapi.json"})

log = logging.getLogger("openrelay.control")

Handler = Callable[[Request], Awaitable[Response]]


def application(settings: Settings, principals: Principals, board: Board) -> App:
    """The ASGI application, with its connections to Kafka and ClickHouse."""
    router = routes(settings, board)

    async def admitted(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if not path.startswith(INFERENCE_ROUTES) and path not in OPEN_PATHS:
            scope.setdefault("state", {})["principal"] = authenticate(Request(scope), principals)
        await router(scope, receive, send)

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await exchange(admitted, scope, receive, send, settings.http, log, lambda *_: ())
        else:
            await router(scope, receive, send)

    return serve


def routes(settings: Settings, board: Board) -> Router:
    """Where a caller is needed, it is in the request's state already."""
    admin = Admin(settings.kafka, "openrelay-control-lag")
    warehouse = usage.Warehouse(settings.clickhouse)

    async def get_usage(request: Request) -> Response:
        asked = usage.question(dict(request.query_params), whose_usage(request, request.state.principal))
        try:
            rows = await asyncio.to_thread(warehouse.usage, asked)
        except ClickHouseError as error:
            log.warning("usage: %s", error)
            raise unavailable("The warehouse does not answer; try again shortly.") from error
        return _json(UsageList(rows))

    async def get_prices(request: Request) -> Response:
        return _json(PriceList(prices.current(settings)))

    async def get_lag(request: Request) -> Response:
        return _json(LagList(by_topic(await _lags(admin))))

    async def get_keys(request: Request) -> Response:
        operators_only(request.state.principal)
        try:
            return _json(KeyList(await asyncio.to_thread(keys.listed, settings)))
        except KafkaFailed as error:
            log.warning("keys: %s", error)
            raise unavailable("The broker does not answer; try again shortly.") from error

    async def dashboard(request: Request) -> Response:
        shown = await ask(settings)
        lags = None
        with suppress(Refusal):
            lags = by_topic(await _lags(admin))
        now_ms = time.time_ns() // 1_000_000
        found = overview(board, shown, lags, whose_batches(request.state.principal), now_ms)
        return HTMLResponse(page(found), headers=HEADERS)

    async def metrics(request: Request) -> Response:
        """Those of every role; when the broker does not answer, without lag."""
        lags: list[PartitionLag] = []
        with suppress(Refusal):
            lags = await _lags(admin)
        shown = await ask(settings)
        catalogue.ROLE_UP.clear()
        for role in shown:
            catalogue.ROLE_UP.labels(role.role).set(role.families is not None)
        catalogue.LAG.clear()
        for row in lags:
            catalogue.LAG.labels(row.group, row.topic, row.partition).set(row.lag)
        registry = catalogue.registry("control")
        registry.register(Everything([*shown, own_process()]))
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def describe(request: Request) -> Response:
        return _json(description())

    async def health(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    @asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        keeping = [
            asyncio.create_task(prices.keep_recorded(settings)),
            asyncio.create_task(sampling.keep_sampling(settings)),
        ]
        signal_ready()
        yield
        for task in keeping:
            task.cancel()

    def get(path: str, handler: Handler) -> Route:
        return Route(path, handler, methods=["GET"])

    return Router(
        [
            get("/", dashboard),
            get("/v1/usage", get_usage),
            get("/v1/prices", get_prices),
            get("/v1/lag", get_lag),
            get("/v1/keys", get_keys),
            get("/metrics", metrics),
            get("/health", health),
            get("/openapi.json", describe),
        ],
        redirect_slashes=False,
        lifespan=lifespan,
    )


async def _lags(admin: Admin) -> list[PartitionLag]:
    try:
        return await asyncio.to_thread(partition_lags, admin)
    except KafkaFailed as error:
        log.warning("lag: %s", error)
        raise unavailable("The broker does not answer; try again shortly.") from error


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
