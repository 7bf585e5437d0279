"""What schemathesis has to know beyond the documents, because JSON Schema cannot say it.

Loaded by schemathesis in a process of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import schemathesis
from hypothesis import strategies as st

_LINES = st.lists(
    st.one_of(
        st.builds(
            lambda custom_id, body: json.dumps(
                {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
            ).encode(),
            st.text(min_size=1, max_size=8),
            st.dictionaries(
                st.sampled_from(["model", "stream", "openrelay"]), st.sampled_from(["m", True, {}])
            ),
        ),
        st.binary(max_size=20).map(lambda line: b"x" + line.replace(b"\n", b"")),
    ),
    min_size=1,
    max_size=4,
)
# A file has a record, which may be anything that is not blank.
schemathesis.openapi.format("binary", _LINES.map(b"\n".join))

_SIGNED = ("organization", "bytes", "expires", "key", "signature")


@schemathesis.deserializer("application/octet-stream")
def _content(_: Any, response: Any) -> str:
    return str(response.content.decode("latin-1"))


@schemathesis.hook
def before_load_schema(_: Any, raw_schema: dict[str, Any]) -> None:
    """What is sent has no other fields than the described; and `put_url` is followed."""
    for schema in raw_schema["components"]["schemas"].values():
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
    for each in _links(raw_schema):
        if "requestBody" in each:
            each["x-schemathesis"] = {"merge_body": False}
    presign = raw_schema["paths"].get("/v1/files/presign")
    if presign is not None:
        # A link's parameters cannot name a part of a string; this extractor is schemathesis' own.
        query = {name: f"$response.body#/put_url#regex:[?&]{name}=([^&]+)" for name in _SIGNED}
        presign["post"]["responses"]["200"]["links"]["PutFile"]["parameters"] |= query


def _links(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for methods in document["paths"].values():
        for operation in methods.values():
            for answer in operation["responses"].values():
                yield from answer.get("links", {}).values()


@schemathesis.hook
def before_call(_: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """The body of a PUT has as many bytes as its URL is signed for."""
    size = str((case.query or {}).get("bytes", ""))
    if case.operation.definition.raw.get("operationId") == "putFile" and len(size) < 7 and size.isdecimal():
        case.body = b"{}".ljust(int(size))
