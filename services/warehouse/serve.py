"""ClickHouse's HTTP interface in front of the engine, for any ClickHouse client on this machine.

One user, `default`, without a password, on 127.0.0.1. A GET may not change anything, as on the server, and
a request that a browser sends from a web page is refused. Statements run in worker threads.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
import uuid
import zlib
from base64 import b64decode
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import lz4.frame
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from services.process import listen, signal_ready
from services.warehouse.engine import TRANSPORT, Answer, Engine, EngineError, Statement

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

WORKERS = 8
"""Statements that run at once; more wait their turn."""
MAX_FIELD_BYTES = 256 * 1024 * 1024
DRAIN_S = 5

_AUTHENTICATION_FAILED = 516
_STATUS = {60: 404, 81: 404, 47: 404, 516: 403, 164: 403, 497: 403, 241: 500, 159: 408}
_CALLERS_FAULT = frozenset({26, 27, 36, 38, 39, 41, 42, 43, 44, 46, 53, 62, 70, 72, 115, 117, 456, 457})
_CONTENT_TYPES = {
    "TabSeparated": "text/tab-separated-values; charset=UTF-8",
    "CSV": "text/csv; charset=UTF-8",
    "JSON": "application/json; charset=UTF-8",
    "JSONEachRow": "application/x-ndjson; charset=UTF-8",
    "Native": "application/octet-stream",
}


def run(directory: Path, host: str, port: int) -> None:
    """Serve until SIGTERM; what runs then is finished for a few seconds."""
    listener = listen(host, port)
    server = uvicorn.Server(
        uvicorn.Config(
            application(Engine(directory)),
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=DRAIN_S,
        )
    )
    asyncio.run(server.serve(sockets=[listener]))


def application(engine: Engine) -> Starlette:
    """The ASGI application; it owns the engine and closes it at the end."""
    workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="query")

    async def query(request: Request) -> Response:
        query_id = request.query_params.get("query_id") or str(uuid.uuid4())
        headers = {"X-ClickHouse-Query-Id": query_id, "X-ClickHouse-Timezone": "UTC"}
        try:
            _admit(request)
            statement = await _statement(request)
            if not statement.body.strip():
                return PlainTextResponse("Ok.\n", headers=headers)  # as the server says that it is alive
            answer = await asyncio.get_running_loop().run_in_executor(workers, engine.run, statement)
        except EngineError as error:
            return _refusal(error, headers)
        return _response(answer, headers)

    async def ping(request: Request) -> Response:
        return PlainTextResponse("Ok.\n")

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        signal_ready()
        yield
        workers.shutdown(wait=True)
        engine.close()

    return Starlette(
        routes=[
            Route("/ping", ping),
            Route("/", query, methods=["GET", "POST"]),
        ],
        lifespan=lifespan,
    )


def _admit(request: Request) -> None:
    user, password = _credentials(request)
    if user != "default" or password:
        raise EngineError(
            f"Code: {_AUTHENTICATION_FAILED}. DB::Exception: {user}: Authentication failed: the embedded "
            "warehouse has one user, default, without a password. (AUTHENTICATION_FAILED)"
        )
    if "origin" in request.headers:
        raise EngineError("Code: 497. DB::Exception: Not from a web page. (ACCESS_DENIED)")


def _credentials(request: Request) -> tuple[str, str]:
    headers, query = request.headers, request.query_params
    authorization = headers.get("authorization", "")
    if authorization.lower().startswith("basic "):
        try:
            user, _, password = b64decode(authorization[6:], validate=True).decode().partition(":")
        except ValueError:
            return "", authorization
        return user, password
    return (
        headers.get("x-clickhouse-user") or query.get("user") or "default",
        headers.get("x-clickhouse-key") or query.get("password") or "",
    )


async def _statement(request: Request) -> Statement:
    """The request as one statement: SQL from the URL, then from the body, which may also be data."""
    values: dict[str, str] = dict(request.query_params)
    if request.headers.get("content-type", "").startswith("multipart/form-data"):
        async with request.form(max_part_size=MAX_FIELD_BYTES) as form:
            for name, value in form.items():
                if not isinstance(value, str):
                    raise EngineError("Code: 48. DB::Exception: No external tables here. (NOT_IMPLEMENTED)")
                values[name] = value
        body = b""
    else:
        body = _decoded(await request.body(), request.headers.get("content-encoding", ""))
    sql = values.get("query", "").encode()
    if sql and body:
        body = sql + b"\n" + body
    return Statement(
        body=body or sql,
        database=values.get("database") or request.headers.get("x-clickhouse-database") or "",
        settings=_settings(values),
        parameters={
            name.removeprefix("param_"): value for name, value in values.items() if name.startswith("param_")
        },
        default_format=values.get("default_format")
        or request.headers.get("x-clickhouse-format")
        or "TabSeparated",
        read_only=request.method == "GET",
    )


def _settings(values: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in values.items()
        if name not in TRANSPORT and not name.startswith("param_")
    }


def _decoded(body: bytes, encoding: str) -> bytes:
    try:
        match encoding:
            case "" | "identity":
                return body
            case "gzip":
                return gzip.decompress(body)
            case "deflate":
                return zlib.decompress(body)
            case "lz4":
                return bytes(lz4.frame.decompress(body))
            case "zstd":
                return bytes(zstd.decompress(body))
    except (OSError, EOFError, RuntimeError, zlib.error, zstd.ZstdError) as error:
        raise EngineError(
            f"Code: 354. DB::Exception: Cannot decompress the {encoding} body: {error}. (CANNOT_DECOMPRESS)"
        ) from error
    raise EngineError(f"Code: 48. DB::Exception: Unknown encoding {encoding!r}. (NOT_IMPLEMENTED)")


def _response(answer: Answer, headers: dict[str, str]) -> Response:
    headers["X-ClickHouse-Summary"] = json.dumps(answer.summary)
    if answer.format is None:
        return Response(answer.body, headers=headers, media_type="text/plain; charset=UTF-8")
    headers["X-ClickHouse-Format"] = answer.format
    kind = _CONTENT_TYPES.get(answer.format, "text/plain; charset=UTF-8")
    return Response(answer.body, headers=headers, media_type=kind)


def _refusal(error: EngineError, headers: dict[str, str]) -> Response:
    headers["X-ClickHouse-Exception-Code"] = str(error.code)
    status = _STATUS.get(error.code, 400 if error.code in _CALLERS_FAULT else 500)
    return PlainTextResponse(f"{error}\n", status_code=status, headers=headers)
