"""The description of the inference host, served at `/openapi.json`.

Objects are described by the structs that are sent; only paths, parameters, request bodies and what may follow
an answer are written down here. Tests compare the paths with the router's, and send whatever is described and
much that is not.
"""

from __future__ import annotations

from schemas.batches import ENDPOINTS, Batch, BatchList, Status
from schemas.errors import ErrorBody
from schemas.facts import Priority
from schemas.files import File, FileDeletion, FileList, Presigned
from schemas.settings import Limits
from services.api import request_bodies
from services.api.describing import (
    Json,
    components,
    document,
    in_header,
    in_path,
    in_query,
    integer,
    json_content,
    link,
    operation,
    reference,
)
from services.api.objects import ModelList, ModelObject

_STRUCTS = (File, FileList, FileDeletion, Presigned, Batch, BatchList, ErrorBody, ModelList, ModelObject)
_BODY = (413, 415)
_TEXT: Json = {"type": "string"}
_FILE, _BATCH, _MODEL = in_path("file"), in_path("batch"), in_path("model")
_FILE_PAGES = [
    in_query("limit", integer(1, 10_000, default=10_000)),
    in_query("after", _TEXT, description="The id of a file: what comes behind it"),
    in_query("order", {"enum": ["desc", "asc"], "default": "desc"}),
    in_query("purpose", _TEXT),
]
_BATCH_PAGES = [
    in_query("limit", integer(1, 100, default=20)),
    in_query("after", _TEXT, description="The id of a batch: what comes behind it"),
]
_SIGNED = [
    in_query(name, _TEXT, required=True, description="As in `put_url`")
    for name in ("organization", "bytes", "expires", "key", "signature")
]
_IDEMPOTENCY_KEY = in_header(
    "Idempotency-Key",
    "The same key and body within 24 hours: the same batch",
    type="string",
    minLength=1,
    maxLength=255,
)
_RANGE = [
    in_header("Range", "One range; several, or none that can be read: the whole file", type="string"),
    in_header("If-Range", "The ETag the range is meant for", type="string"),
]
_ETAG: Json = {
    "ETag": {"required": True, "schema": {"type": "string", "pattern": '^"[^"]+"$'}},
    "Accept-Ranges": {"required": True, "schema": {"const": "bytes"}},
    "Content-Disposition": {"required": True, "schema": _TEXT},
}
_CONTENT_RANGE: Json = {
    "Content-Range": {"required": True, "schema": {"type": "string", "pattern": r"^bytes \d+-\d+/\d+$"}}
}

_PUT_LINK: Json = {
    "PutFile": link("putFile", "PUT the file to `put_url`, as it is", file="$response.body#/file_id")
}


def description(limits: Limits) -> Json:
    """The whole document."""
    schemas = components(_STRUCTS)
    schemas["Batch"]["properties"] |= {
        "endpoint": {"enum": list(ENDPOINTS)},
        "priority": {"enum": [each.value for each in Priority]},
        "status": {"enum": [each.value for each in Status]},
        "completion_window": {"const": "24h"},
    }
    schemas["File"]["properties"]["purpose"] = {"enum": ["batch", "batch_output", "batch_error"]}
    paths = _open_paths() | _model_paths() | _file_paths(limits) | _batch_paths(limits)
    return document("OpenRelay Batch, inference host", {}, schemas, paths)


def _open_paths() -> Json:
    about = {"type": "object"}
    return {
        "/health": {"get": _open("health", "Whether this process serves", {"200": _answer(about)})},
        "/openapi.json": {"get": _open("describe", "This document", {"200": _answer(about)})},
    }


def _model_paths() -> Json:
    links = {"GetModel": link("getModel", "One of them", model="$response.body#/data/0/id")}
    return {
        "/v1/models": {"get": _keyed("listModels", "Models that are served", {"200": _of(ModelList, links)})},
        "/v1/models/{model}": {
            "get": _keyed("getModel", "One model", {"200": _of(ModelObject)}, 404, parameters=[_MODEL])
        },
    }


def _file_paths(limits: Limits) -> Json:
    return {
        "/v1/files": {
            "post": _keyed(
                "createFile",
                "Upload an input file",
                {"200": _of(File, _links_of_file() | {"CreateBatch": _batch_of("$response.body#/id")})},
                *(404, *_BODY, 429),
                body=request_bodies.upload(),
            ),
            "get": _keyed(
                "listFiles",
                "Files, newest first",
                {
                    "200": _of(
                        FileList,
                        {
                            "GetFile": link("getFile", "The first", file="$response.body#/data/0/id"),
                            "Next": link("listFiles", "The next page", after="$response.body#/last_id"),
                        },
                    )
                },
                404,
                parameters=_FILE_PAGES,
            ),
        },
        "/v1/files/presign": {
            "post": _keyed(
                "presignFile",
                "A URL to PUT one file to",
                {"200": _of(Presigned, _PUT_LINK)},
                *(404, *_BODY),
                body=request_bodies.presign(limits),
            )
        },
        "/v1/uploads/{file}": {"put": _put()},
        "/v1/files/{file}/complete": {
            "post": _keyed(
                "completeFile",
                "Make the file that was PUT exist",
                {"200": _of(File, _links_of_file() | {"CreateBatch": _batch_of("$response.body#/id")})},
                404,
                parameters=[_FILE],
            )
        },
        "/v1/files/{file}/content": {"get": _content()},
        "/v1/files/{file}": {
            "get": _keyed(
                "getFile", "One file", {"200": _of(File, _links_of_file())}, 404, parameters=[_FILE]
            ),
            "delete": _keyed(
                "deleteFile", "Delete a file", {"200": _of(FileDeletion)}, 404, 409, parameters=[_FILE]
            ),
        },
    }


def _put() -> Json:
    links = {"Complete": link("completeFile", "Make it a file", file="$request.path.file")}
    return _open(
        "putFile",
        "Send the file a URL was signed for",
        {"200": {"description": "The URL is used; complete the file", "links": links}},
        *(403, 409, 411, 415, 429),
        parameters=[_FILE, *_SIGNED],
        body=request_bodies.put(),
    )


def _content() -> Json:
    content = {"application/octet-stream": {"schema": {"type": "string"}}}
    return _keyed(
        "getFileContent",
        "The bytes of a file",
        {
            "200": {"description": "All of them", "headers": _ETAG, "content": content},
            "206": {"description": "Those asked for", "headers": _ETAG | _CONTENT_RANGE, "content": content},
        },
        *(404, 416),
        parameters=[_FILE, *_RANGE],
    )


def _batch_paths(limits: Limits) -> Json:
    batch = "$response.body#/id"
    get = {"GetBatch": link("getBatch", "How far it is", batch=batch)}
    cancel = {"CancelBatch": link("cancelBatch", "Stop starting records", batch=batch)}
    source = {"GetInput": link("getFile", "Its input", file="$response.body#/input_file_id")}
    pages = {
        "GetBatch": link("getBatch", "The first", batch="$response.body#/data/0/id"),
        "Next": link("listBatches", "The next page", after="$response.body#/last_id"),
    }
    return {
        "/v1/batches": {
            "post": _keyed(
                "createBatch",
                "Create a batch from a file or from records sent along",
                {"200": _of(Batch, get | cancel | source)},
                *(404, 409, *_BODY, 429),
                parameters=[_IDEMPOTENCY_KEY],
                body=request_bodies.order(limits),
            ),
            "get": _keyed(
                "listBatches",
                "Batches, newest first",
                {"200": _of(BatchList, pages)},
                404,
                parameters=_BATCH_PAGES,
            ),
        },
        "/v1/batches/{batch}": {
            "get": _keyed(
                "getBatch", "One batch", {"200": _of(Batch, cancel | source)}, 404, parameters=[_BATCH]
            )
        },
        "/v1/batches/{batch}/cancel": {
            "post": _keyed(
                "cancelBatch",
                "Stop starting records",
                {"200": _of(Batch, get)},
                *(404, 409),
                parameters=[_BATCH],
            )
        },
    }


def _links_of_file() -> Json:
    file = "$response.body#/id"
    return {
        "GetFile": link("getFile", "Its metadata", file=file),
        "GetFileContent": link("getFileContent", "Its bytes", file=file),
        "DeleteFile": link("deleteFile", "Delete it", file=file),
    }


def _batch_of(file: str) -> Json:
    body = {"endpoint": ENDPOINTS[0], "completion_window": "24h", "input_file_id": file}
    return link("createBatch", "Run it", body)


def _of(kind: type, links: Json | None = None) -> Json:
    return _answer(reference(kind)) | ({"links": links} if links else {})


def _answer(schema: Json) -> Json:
    return {"description": "Done", "content": json_content(schema)}


def _keyed(
    name: str,
    summary: str,
    good: Json,
    *refusals: int,
    parameters: list[Json] | None = None,
    body: Json | None = None,
) -> Json:
    """An operation that needs a key."""
    return operation(name, summary, good, (401, 503, *refusals), _sent(parameters, body))


def _open(
    name: str,
    summary: str,
    good: Json,
    *refusals: int,
    parameters: list[Json] | None = None,
    body: Json | None = None,
) -> Json:
    """An operation that needs none."""
    return operation(name, summary, good, (503, *refusals), {"security": []} | _sent(parameters, body))


def _sent(parameters: list[Json] | None, body: Json | None) -> Json:
    found: Json = {}
    if parameters:
        found["parameters"] = parameters
    if body is not None:
        found["requestBody"] = {"required": True, "content": body}
    return found
