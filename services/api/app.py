"""The application: routes to handlers, wrapped by the gate."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

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

    document = msgspec.json.encode(description(_version()))

    async def describe(_: Request) -> Response:
        return Response(document, media_type="application/json")

    async def health(_: Request) -> Response:
        if parts.model.failure is not None:
            raise refusals.unavailable()
        return Response(b'{"status":"ok"}', media_type="application/json")

    routes = [
        Route("/health", health, methods=["GET"]),
        Route("/openapi.json", describe, methods=["GET"]),
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
    used = KeyUse(parts.facts).note
    return Gate(router, principals, http, Cors(http), lambda: parts.model.ready, used)


def _version() -> str:
    """Of the installed package; a checkout that is not installed has none."""
    try:
        return version("openrelay-batch")
    except PackageNotFoundError:
        return "0"


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
