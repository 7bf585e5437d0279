"""The application: routes to handlers, wrapped by the gate."""

from __future__ import annotations

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
from services.api.parts import Parts
from services.api.principals import Principals


class ModelObject(msgspec.Struct, frozen=True):
    id: str
    created: int = 0
    owned_by: str = "openrelay"
    object: str = "model"


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelObject]
    object: str = "list"


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

    async def health(_: Request) -> Response:
        if parts.model.failure is not None:
            raise refusals.unavailable()
        return Response(b'{"status":"ok"}', media_type="application/json")

    routes = [
        Route("/health", health, methods=["GET"]),
        Route("/v1/models", list_models, methods=["GET"]),
        Route("/v1/models/{model:path}", get_model, methods=["GET"]),
        Route("/v1/files", files.create, methods=["POST"]),
        Route("/v1/files", files.list, methods=["GET"]),
        Route("/v1/files/presign", files.presign, methods=["POST"]),
        Route("/v1/uploads/{file}", files.put, methods=["PUT"]),
        Route("/v1/files/{file}/complete", files.complete, methods=["POST"]),
        Route("/v1/files/{file}/content", files.content, methods=["GET"]),
        Route("/v1/files/{file}", files.get, methods=["GET"]),
        Route("/v1/files/{file}", files.delete, methods=["DELETE"]),
        Route("/v1/batches", batches.create, methods=["POST"]),
        Route("/v1/batches", batches.list, methods=["GET"]),
        Route("/v1/batches/{batch}", batches.get, methods=["GET"]),
        Route("/v1/batches/{batch}/cancel", batches.cancel, methods=["POST"]),
    ]
    router = Router(routes, redirect_slashes=False)
    http = parts.settings.http
    principals = Principals(parts.settings.organizations, parts.model.issued_key)
    return Gate(router, principals, http, Cors(http), lambda: parts.model.ready)


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
