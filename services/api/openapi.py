"""The description of the inference host, served at `/openapi.json`.

Objects are described by the structs that are sent; only paths, parameters and request bodies are written
down here. A test compares the paths with the router's.
"""

from __future__ import annotations

from typing import Any

import msgspec

from schemas.batches import ENDPOINTS, Batch, BatchList
from schemas.errors import ErrorBody
from schemas.files import File, FileDeletion, FileList, Presigned
from services.api.objects import ModelList, ModelObject

Json = dict[str, Any]

_STRUCTS = (File, FileList, FileDeletion, Presigned, Batch, BatchList, ErrorBody, ModelList, ModelObject)
_REF = "#/components/schemas/{name}"


def description(version: str) -> Json:
    """The whole document."""
    _, components = msgspec.json.schema_components(_STRUCTS, ref_template=_REF)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "OpenRelay Batch, inference host",
            "version": version,
            "description": "Other methods than the ones described are answered 405, with Allow.",
        },
        "security": [{"bearer": []}, {"header": []}],
        "paths": _paths(),
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "schemas": components,
        },
    }


def _paths() -> Json:
    file, batch = _in_path("file"), _in_path("batch")
    return {
        "/health": {"get": _open(_operation("health", "Whether this process serves", {"type": "object"}))},
        "/openapi.json": {"get": _open(_operation("describe", "This document", {"type": "object"}))},
        "/v1/models": {"get": _operation("listModels", "Models that are served", ModelList)},
        "/v1/models/{model}": {
            "get": _operation("getModel", "One model", ModelObject, [_in_path("model")], 404)
        },
        "/v1/files": {
            "post": _operation(
                "createFile", "Upload an input file", File, [], 404, *_BODY, 429, body=_UPLOAD
            ),
            "get": _operation("listFiles", "Files, newest first", FileList, _FILE_PAGES, 404),
        },
        "/v1/files/presign": {
            "post": _operation(
                "presignFile", "A URL to PUT one file to", Presigned, [], 404, *_BODY, body=_json(_PRESIGN)
            )
        },
        "/v1/uploads/{file}": {
            "put": _open(
                _operation(
                    "putFile",
                    "Send the file a URL was signed for",
                    None,
                    [file, *_SIGNED],
                    403,
                    409,
                    411,
                    415,
                    429,
                    body={"application/octet-stream": {"schema": {}}},
                )
            )
        },
        "/v1/files/{file}/complete": {
            "post": _operation("completeFile", "Make the file that was PUT exist", File, [file], 404)
        },
        "/v1/files/{file}/content": {
            "get": _operation("getFileContent", "The bytes of a file", bytes, [file], 404, 416)
        },
        "/v1/files/{file}": {
            "get": _operation("getFile", "One file", File, [file], 404),
            "delete": _operation("deleteFile", "Delete a file", FileDeletion, [file], 404, 409),
        },
        "/v1/batches": {
            "post": _operation(
                "createBatch",
                "Create a batch from a file or from records sent along",
                Batch,
                [_IDEMPOTENCY_KEY],
                *(404, 409, *_BODY, 429),
                body=_json(_ORDER),
            ),
            "get": _operation("listBatches", "Batches, newest first", BatchList, _BATCH_PAGES, 404),
        },
        "/v1/batches/{batch}": {"get": _operation("getBatch", "One batch", Batch, [batch], 404)},
        "/v1/batches/{batch}/cancel": {
            "post": _operation("cancelBatch", "Stop starting records", Batch, [batch], 404, 409)
        },
    }


def _operation(
    name: str,
    summary: str,
    answer: type | Json | None,
    parameters: list[Json] | None = None,
    *refusals: int,
    body: Json | None = None,
) -> Json:
    good: Json = {"description": "Done"}
    if answer is bytes:
        good["content"] = {"application/octet-stream": {"schema": {}}}
    elif isinstance(answer, dict):
        good["content"] = _json(answer)
    elif answer is not None:
        good["content"] = _json({"$ref": _REF.format(name=answer.__name__)})
    answers = {"200": good}
    if answer is bytes:
        answers["206"] = good | {"description": "The range asked for"}
    for status in sorted({401, 503, *_OF_ANY_REQUEST, *refusals}):
        answers[str(status)] = {
            "description": "Refused",
            "content": _json({"$ref": _REF.format(name="ErrorBody")}),
        }
    operation: Json = {"operationId": name, "summary": summary, "responses": answers}
    if parameters:
        operation["parameters"] = parameters
    if body is not None:
        operation["requestBody"] = {"required": True, "content": body}
    return operation


def _open(operation: Json) -> Json:
    """An operation that needs no key."""
    answers = {status: each for status, each in operation["responses"].items() if status != "401"}
    return operation | {"security": [], "responses": answers}


def _json(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def _in_path(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _in_query(name: str, required: bool = False, **schema: Any) -> Json:
    return {"name": name, "in": "query", "required": required, "schema": schema}


def _integer(least: int, most: int, **more: Any) -> Json:
    return {"type": "integer", "minimum": least, "maximum": most} | more


_OF_ANY_REQUEST = (400, 408, 431)
"""What is not HTTP, comes too slowly, or has too large headers."""
_BODY = (413, 415)
_TTL = _integer(3_600, 2_592_000)
_FILE_PAGES = [
    _in_query("limit", **_integer(1, 10_000, default=10_000)),
    _in_query("after", type="string"),
    _in_query("order", type="string", enum=["asc", "desc"]),
    _in_query("purpose", type="string"),
]
_BATCH_PAGES = [_in_query("limit", **_integer(1, 100, default=20)), _in_query("after", type="string")]
_SIGNED = [
    _in_query(name, required=True, type="string")
    for name in ("organization", "bytes", "expires", "key", "signature")
]
_IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255},
}
_UPLOAD = {
    "multipart/form-data": {
        "schema": {
            "type": "object",
            "required": ["purpose", "file"],
            "properties": {
                "purpose": {"const": "batch"},
                "file": {"type": "string", "format": "binary"},
                "expires_after[anchor]": {"const": "created_at"},
                "expires_after[seconds]": _TTL,
            },
        }
    }
}
_PRESIGN = {
    "type": "object",
    "required": ["bytes"],
    "additionalProperties": False,
    "properties": {"bytes": {"type": "integer", "minimum": 1}, "filename": {"type": ["string", "null"]}},
}
_ORDER = {
    "type": "object",
    "required": ["endpoint", "completion_window"],
    "additionalProperties": False,
    "properties": {
        "endpoint": {"enum": list(ENDPOINTS)},
        "completion_window": {"const": "24h"},
        "input_file_id": {"type": ["string", "null"]},
        "requests": {"type": ["array", "null"], "minItems": 1, "maxItems": 50_000},
        "metadata": {
            "type": ["object", "null"],
            "maxProperties": 16,
            "propertyNames": {"maxLength": 64},
            "additionalProperties": {"type": "string", "maxLength": 512},
        },
        "model": {"type": ["string", "null"], "minLength": 1, "maxLength": 256},
        "priority": {"enum": ["standard", "expedited", None]},
        "output_expires_after": {
            "type": ["object", "null"],
            "required": ["anchor", "seconds"],
            "additionalProperties": False,
            "properties": {"anchor": {"const": "created_at"}, "seconds": _TTL},
        },
    },
}
