"""The control host: usage, lag, metrics. It serves no file or batch.

A batch or file route answers 404 before any key is looked at, everything else 401 before 404. `/health` and
`/metrics` need no key: they say nothing about any organization.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import msgspec
import uvicorn
from clickhouse_connect.driver.exceptions import ClickHouseError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from schemas import topics
from schemas.facts import KeyRole
from schemas.settings import Settings
from services.api.principals import Principal, Principals, presented_key
from services.api.refusals import Refusal, invalid, not_found, unavailable
from services.control import usage
from services.control.issued import IssuedKeys
from services.control.lag import PartitionLag, by_topic, partition_lags
from services.control.shown import Everything, ask, own_process
from services.process import listen, signal_ready
from streams import metrics as catalogue
from streams.kafka.admin import Admin
from streams.kafka.follow import Follower
from streams.kafka.messages import KafkaFailed

CATCH_UP_S = 60.0
FAILURE_CHECK_S = 1.0
INFERENCE_ROUTES = ("/v1/files", "/v1/batches", "/v1/chat", "/v1/completions", "/v1/models")

log = logging.getLogger("openrelay.control")

Handler = Callable[[Request], Awaitable[Response]]


def run(settings: Settings, host: str, port: int) -> None:
    """Serve until SIGTERM."""
    listener = listen(host, port)
    issued = IssuedKeys()
    follower = Follower(settings.kafka, "openrelay-control", [topics.KEYS], issued.apply)
    follower.start()
    follower.wait_caught_up(CATCH_UP_S)
    config = uvicorn.Config(
        application(settings, Principals(settings.organizations, issued.find)),
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=max(1, round(settings.limits.drain_s)),
    )
    try:
        asyncio.run(_serve(uvicorn.Server(config), listener, follower))
    finally:
        follower.stop()


async def _serve(server: uvicorn.Server, listener: socket.socket, follower: Follower) -> None:
    """Serve until told to stop; without news of keys this process is better started again."""
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    while not serving.done():
        await asyncio.wait({serving}, timeout=FAILURE_CHECK_S)
        if follower.failure is not None:
            server.should_exit = True
            await serving
            raise follower.failure
    await serving


def application(settings: Settings, principals: Principals) -> Starlette:
    """The ASGI application, with its connections to Kafka and ClickHouse."""
    admin = Admin(settings.kafka, "openrelay-control-lag")
    warehouse = usage.Warehouse(settings.clickhouse)

    async def get_usage(request: Request) -> Response:
        caller = _caller(request, principals)
        asked = usage.question(dict(request.query_params), _whose(request, caller))
        try:
            rows = await asyncio.to_thread(warehouse.usage, asked)
        except ClickHouseError as error:
            log.warning("usage: %s", error)
            raise unavailable("The warehouse does not answer; try again shortly.") from error
        return _json({"object": "list", "data": rows})

    async def get_lag(request: Request) -> Response:
        _caller(request, principals)
        return _json({"object": "list", "data": by_topic(await _lags(admin, settings))})

    async def metrics(request: Request) -> Response:
        """Those of every role; when the broker does not answer, without lag."""
        lags: list[PartitionLag] = []
        with suppress(Refusal):
            lags = await _lags(admin, settings)
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

    async def health(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        signal_ready()
        yield

    def get(path: str, handler: Handler) -> Route:
        return Route(path, _answered(handler), methods=["GET"])

    async def absent(request: Request, error: Exception) -> Response:
        return await _answered(_absent(principals))(request)

    return Starlette(
        routes=[
            get("/v1/usage", get_usage),
            get("/v1/lag", get_lag),
            get("/metrics", metrics),
            get("/health", health),
        ],
        lifespan=lifespan,
        exception_handlers={404: absent, 405: absent, HTTPException: absent},
    )


def _answered(handler: Handler) -> Handler:
    async def answered(request: Request) -> Response:
        try:
            response = await handler(request)
        except Refusal as refusal:
            response = Response(refusal.body(), refusal.status, refusal.headers, "application/json")
        response.headers["x-request-id"] = "req_" + secrets.token_hex(12)
        return response

    return answered


def _absent(principals: Principals) -> Handler:
    async def absent(request: Request) -> Response:
        if not request.url.path.startswith(INFERENCE_ROUTES):
            _caller(request, principals)
        raise not_found()

    return absent


def _caller(request: Request, principals: Principals) -> Principal:
    return principals.authenticate(presented_key(dict(request.headers.raw)))


def _whose(request: Request, caller: Principal) -> str | None:
    """Whose usage the caller may read: its own, and with a finance or operator key anyone's."""
    asked = request.query_params.get("organization")
    if caller.role is KeyRole.ORGANIZATION:
        if asked not in (None, caller.organization):
            raise not_found()
        if "organization" in request.query_params.get("group_by", "").split(","):
            raise invalid("group_by: organization needs a finance key", "group_by")
        return caller.organization
    return asked


async def _lags(admin: Admin, settings: Settings) -> list[PartitionLag]:
    try:
        return await asyncio.to_thread(partition_lags, admin, settings)
    except KafkaFailed as error:
        log.warning("lag: %s", error)
        raise unavailable("The broker does not answer; try again shortly.") from error


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
