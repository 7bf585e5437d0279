"""The description of the control host, served at `/openapi.json`.

Objects are described by the structs that are sent; a test compares the paths with the router's.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from schemas.errors import ErrorBody
from services.control.lag import Lag
from services.control.prices import PriceRow
from services.control.usage import DIMENSIONS, UsageRow
from services.operator.keys import Key

Json = dict[str, Any]


class UsageList(msgspec.Struct, frozen=True):
    data: list[UsageRow]
    object: str = "list"


class PriceList(msgspec.Struct, frozen=True):
    data: list[PriceRow]
    object: str = "list"


class LagList(msgspec.Struct, frozen=True):
    data: list[Lag]
    object: str = "list"


class KeyList(msgspec.Struct, frozen=True):
    data: list[Key]
    object: str = "list"


_REF = "#/components/schemas/{name}"
_STRUCTS = (UsageList, PriceList, LagList, KeyList, ErrorBody)
_DAY = {"type": "string", "format": "date"}
_TEXT = {"type": "string"}
_USAGE = {
    "group_by": {
        "type": "string",
        "default": "model",
        "description": f"Comma-separated, of {', '.join(DIMENSIONS)}; organization needs a finance key",
    },
    "start": _DAY,
    "end": _DAY,
    "batch": _TEXT,
    "organization": _TEXT,
}


def description() -> Json:
    """The whole document."""
    _, components = msgspec.json.schema_components(_STRUCTS, ref_template=_REF)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "OpenRelay Batch, control host",
            "version": _release(),
            "description": "Other methods than the ones described are answered 405, with Allow.",
        },
        "security": [{"bearer": []}, {"header": []}],
        "paths": {
            "/": {"get": _get("dashboard", "The dashboard, for browsers", "text/html", 401) | _BASIC},
            "/health": {"get": _get("health", "Whether this process serves", "text/plain") | _OPEN},
            "/metrics": {
                "get": _get("metrics", "Metrics of every process, for Prometheus", "text/plain") | _OPEN
            },
            "/openapi.json": {"get": _get("describe", "This document", "application/json") | _OPEN},
            "/v1/usage": {"get": _list("getUsage", "Usage and cost by group", UsageList, 404, 503, **_USAGE)},
            "/v1/prices": {"get": _list("getPrices", "What a new batch pays", PriceList)},
            "/v1/lag": {
                "get": _list("getLag", "Records that wait, by consumer group and topic", LagList, 503)
            },
            "/v1/keys": {"get": _list("getKeys", "All API keys, for operators", KeyList, 404, 503)},
        },
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                "browser": {"type": "http", "scheme": "basic"},
            },
            "schemas": components,
        },
    }


_OF_ANY_REQUEST = (400, 408, 431)
"""What is not HTTP, comes too slowly, or has too large headers."""
_OPEN: Json = {"security": []}
_BASIC: Json = {"security": [{"bearer": []}, {"header": []}, {"browser": []}]}


def _release() -> str:
    """Of the installed package; a checkout that is not installed has none."""
    try:
        return version("openrelay-batch")
    except PackageNotFoundError:
        return "0"


def _get(name: str, summary: str, media: str, *refusals: int) -> Json:
    answers: Json = {"200": {"description": summary, "content": {media: {}}}}
    for status in sorted((*_OF_ANY_REQUEST, *refusals)):
        content = {"application/json": _reference(ErrorBody)}
        answers[str(status)] = {"description": "Refused", "content": content}
    return {"operationId": name, "summary": summary, "responses": answers}


def _list(name: str, summary: str, kind: type, *refusals: int, **parameters: Json) -> Json:
    operation = _get(name, summary, "application/json", 401, *refusals)
    operation["responses"]["200"]["content"]["application/json"] = _reference(kind)
    if parameters:
        operation["parameters"] = [
            {"name": parameter, "in": "query", "schema": schema} for parameter, schema in parameters.items()
        ]
    return operation


def _reference(kind: type) -> Json:
    return {"schema": {"$ref": _REF.format(name=kind.__name__)}}
