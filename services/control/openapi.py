"""The description of the control host, served at `/openapi.json`.

Objects are described by the structs that are sent; a test compares the paths with the router's.
"""

from __future__ import annotations

import msgspec

from services.api.describing import Json, components, document, in_query, json_content, operation, reference
from services.control.lag import Lag
from services.control.prices import PriceRow
from services.control.usage import DIMENSIONS, UsageRow
from services.operator.keys import Key


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


_STRUCTS = (UsageList, PriceList, LagList, KeyList)
_DAY = {"type": "string", "format": "date"}
_TEXT = {"type": "string"}
_USAGE = [
    in_query(
        "group_by",
        {"type": "array", "items": {"enum": list(DIMENSIONS)}, "default": ["model"]},
        style="form",
        explode=False,
        description="Separated by commas; organization needs a finance key",
    ),
    in_query("start", _DAY, description="The first day, UTC"),
    in_query("end", _DAY, description="The last day, UTC"),
    in_query("batch", _TEXT),
    in_query("organization", _TEXT, description="Another than one's own needs a finance key"),
]
_KEYED: Json = {}
"""As the whole document has it."""
_OPEN: Json = {"security": []}
_BROWSER: Json = {"security": [{"bearer": []}, {"header": []}, {"browser": []}]}


def description() -> Json:
    """The whole document."""
    paths = {
        "/": {"get": _get("dashboard", "The dashboard, for browsers", "text/html", _BROWSER, 401)},
        "/health": {"get": _get("health", "Whether this process serves", "text/plain", _OPEN)},
        "/metrics": {"get": _get("metrics", "Metrics of every process, for Prometheus", "text/plain", _OPEN)},
        "/openapi.json": {"get": _get("describe", "This document", "application/json", _OPEN)},
        "/v1/usage": {
            "get": _list("getUsage", "Usage and cost by group", UsageList, {"parameters": _USAGE}, 404, 503)
        },
        "/v1/prices": {"get": _list("getPrices", "What a new batch pays", PriceList, _KEYED)},
        "/v1/lag": {
            "get": _list("getLag", "Records that wait, by consumer group and topic", LagList, _KEYED, 503)
        },
        "/v1/keys": {"get": _list("getKeys", "All API keys, for operators", KeyList, _KEYED, 404, 503)},
    }
    schemes = {"browser": {"type": "http", "scheme": "basic"}}
    schemas = components(_STRUCTS, partial=[UsageRow.__name__])
    return document("OpenRelay Batch, control host", schemes, schemas, paths)


def _get(name: str, summary: str, media: str, more: Json, *refusals: int) -> Json:
    return operation(name, summary, {"200": {"description": "Done", "content": {media: {}}}}, refusals, more)


def _list(name: str, summary: str, kind: type, more: Json, *refusals: int) -> Json:
    good = {"200": {"description": "Done", "content": json_content(reference(kind))}}
    return operation(name, summary, good, (401, *refusals), more)
