"""The application: routes to handlers, wrapped by the gate."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from services.api import refusals
from services.api.batches import BatchRoutes
from services.api.cors import Cors
from services.api.creation import Creation
from services.api.files import FileRoutes
from services.api.gate import Gate
from services.api.key_use import KeyUse
from services.api.objects import ModelList, ModelObject
from services.api.openapi import description
from services.api.parts import Parts
from services.api.principals import Principals

Handler = Callable[[Request], Awaitable[Response]]


def build(parts: Parts, creation: Creation) -> Gate:
    files = FileRoutes(parts)
    batches = BatchRoutes(parts, creation)
    models = [ModelObject(name) for name in parts.settings.models]

    async def list_models(_: Request) -> Response:
        return _json(ModelList(models))

    async def get_model(request: Request) -> Response:
        for model in models:
            if model.id == request.path_params["model"]:
                return _json(model)
        raise refusals.not_found()

    document = msgspec.json.encode(description(parts.settings.limits))

    async def describe(_: Request) -> Response:
        return Response(document, media_type="application/json")

    async def health(_: Request) -> Response:
        if parts.model.failure is not None:
            raise refusals.unavailable()
        return Response(b'{"status":"ok"}', media_type="application/json")

    routes = [
        _route("/health", GET=health),
        _route("/openapi.json", GET=describe),
        _route("/v1/models", GET=list_models),
        _route("/v1/models/{model:path}", GET=get_model),
        _route("/v1/files", GET=files.list, POST=files.create),
        _route("/v1/files/presign", POST=files.presign),
        _route("/v1/uploads/{file}", PUT=files.put),
        _route("/v1/files/{file}/complete", POST=files.complete),
        _route("/v1/files/{file}/content", GET=files.content),
        _route("/v1/files/{file}", GET=files.get, DELETE=files.delete),
        _route("/v1/batches", GET=batches.list, POST=batches.create),
        _route("/v1/batches/{batch}", GET=batches.get),
        _route("/v1/batches/{batch}/cancel", POST=batches.cancel),
    ]
    router = Router(routes, redirect_slashes=False)
    http = parts.settings.http
    principals = Principals(parts.settings.organizations, parts.model.issued_key)
    used = KeyUse(parts.facts).note
    return Gate(router, principals, http, Cors(http), lambda: parts.model.ready, used)


def _route(path: str, **handlers: Handler) -> Route:
    """One route for all methods of a path, so that a refusal of another method can name them."""

    async def handle(request: Request) -> Response:
        return await handlers["GET" if request.method == "HEAD" else request.method](request)

    return Route(path, handle, methods=list(handlers))


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
