"""Words for describing a host in OpenAPI 3.1: operations, their answers, and the headers these carry.

What any request may be answered is added to every operation, so that only what is its own has to be said.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from schemas.errors import ErrorBody
from services.api.refusals import RETRY_AFTER_S

Json = dict[str, Any]

_REF = "#/components/schemas/{name}"
_OF_ANY_REQUEST = (400, 408, 431)
_MEANINGS = {
    400: "Something about the request is wrong: `error.param` names what, or it is not HTTP/1.1",
    401: "The API key is missing, malformed, unknown or revoked: `invalid_api_key`",
    403: "The URL was changed, or its time is over: `invalid_signature`",
    404: "There is nothing here under this id or path: `not_found`",
    408: "The headers or the body came too slowly",
    409: "The present state does not allow it: `error.code` says why. Repeating does not help",
    411: "The body has no Content-Length",
    413: "Too large: `file_too_large`",
    415: "Bodies are taken without Content-Encoding: `unsupported_content_encoding`",
    416: "The range lies outside of the file",
    429: "Too much at once: `too_many_uploads`, `quota_exceeded`",
    431: "The headers are too large",
    503: "Not now, try again: `unavailable`",
}
_ID: Json = {
    "x-request-id": {
        "description": "Names this answer in our log",
        "required": True,
        "schema": {"type": "string", "pattern": "^req_[0-9a-f]+$"},
    }
}
_RETRY_AFTER: Json = {
    "Retry-After": {"required": True, "description": "Seconds", "schema": {"const": RETRY_AFTER_S}}
}
_NO_RETRY: Json = {"schema": {"const": "false"}, "description": "Whether an SDK should send it again"}
_HEADERS: dict[int, Json] = {
    401: {"WWW-Authenticate": {"required": True, "schema": {"type": "string"}}},
    409: {"x-should-retry": _NO_RETRY | {"required": True}},
    415: {"Accept-Encoding": {"required": True, "schema": {"const": "identity"}}},
    416: {"Content-Range": {"required": True, "schema": {"type": "string", "pattern": r"^bytes \*/\d+$"}}},
    429: _RETRY_AFTER | {"x-should-retry": _NO_RETRY},
    503: _RETRY_AFTER,
}


def document(title: str, schemes: Json, components: Json, paths: Json) -> Json:
    """The whole document. An operation needs a key, by `bearer` or `header`, unless it says otherwise."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": title,
            "version": _release(),
            "description": "Other methods than the ones described are answered 405, with Allow.",
        },
        "security": [{"bearer": []}, {"header": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            }
            | schemes,
            "schemas": components,
        },
    }


def components(structs: Iterable[type[msgspec.Struct]], partial: Iterable[str] = ()) -> Json:
    """Schemas of objects that are sent, with every field, but for the `partial` ones."""
    _, found = msgspec.json.schema_components((*structs, ErrorBody), ref_template=_REF)
    for name, schema in found.items():
        if name not in partial and "properties" in schema:
            schema["required"] = list(schema["properties"])
    return found


def reference(kind: type) -> Json:
    return {"$ref": _REF.format(name=kind.__name__)}


def json_content(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def operation(name: str, summary: str, good: Json, refusals: Iterable[int], more: Json) -> Json:
    """One operation. `good` has its answers of 2xx by status; `more` is what else there is to say."""
    answers = {
        status: answer | {"headers": _ID | answer.get("headers", {})} for status, answer in good.items()
    }
    for status in sorted({*_OF_ANY_REQUEST, *refusals}):
        answers[str(status)] = {
            "description": _MEANINGS[status],
            "headers": _ID | _HEADERS.get(status, {}),
            "content": json_content(reference(ErrorBody)),
        }
    return {"operationId": name, "summary": summary, "responses": answers} | more


def link(operation_id: str, description: str, body: Json | None = None, **parameters: str) -> Json:
    """What may be done next with an answer; parameters and body are runtime expressions."""
    found: Json = {"operationId": operation_id, "description": description}
    if parameters:
        found["parameters"] = parameters
    if body is not None:
        found["requestBody"] = body
    return found


def in_path(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def in_query(name: str, schema: Json, required: bool = False, **more: Any) -> Json:
    return {"name": name, "in": "query", "required": required, "schema": schema} | more


def in_header(name: str, description: str, **schema: Any) -> Json:
    return {"name": name, "in": "header", "description": description, "schema": schema}


def integer(least: int, most: int, **more: Any) -> Json:
    return {"type": "integer", "minimum": least, "maximum": most} | more


def _release() -> str:
    """Of the installed package; a checkout that is not installed has none."""
    try:
        return version("openrelay-batch")
    except PackageNotFoundError:
        return "0"
