"""The request bodies of the inference host, described as exactly as JSON Schema can."""

from __future__ import annotations

from schemas.batches import ENDPOINTS
from schemas.settings import Limits
from services.api import orders
from services.api.describing import Json, integer

_ABSENT: Json = {"type": "null"}
"""A field given as null counts as absent, whatever its name."""
_TTL = integer(orders.LEAST_TTL_S, orders.MOST_TTL_S)
_EXPIRES_AFTER = {
    "type": ["object", "null"],
    "required": ["anchor", "seconds"],
    "additionalProperties": False,
    "properties": {"anchor": {"const": "created_at"}, "seconds": _TTL},
}
_EXAMPLE = {
    "endpoint": ENDPOINTS[0],
    "completion_window": "24h",
    "requests": [
        {
            "custom_id": "req-1",
            "body": {
                "model": "openrelay/gpt-oss-120b",
                "messages": [{"role": "user", "content": "Name three primary colors."}],
            },
        }
    ],
}


def upload() -> Json:
    """Multipart; the parts may come in any order."""
    anchor, seconds = "expires_after[anchor]", "expires_after[seconds]"
    return {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["purpose", "file"],
                "additionalProperties": False,
                "properties": {
                    "purpose": {"const": "batch"},
                    "file": {
                        "type": "string",
                        "format": "binary",
                        "description": "JSONL in UTF-8, at least one record, sent with a filename",
                    },
                    anchor: {"const": "created_at"},
                    seconds: _TTL,
                },
                "dependentRequired": {anchor: [seconds], seconds: [anchor]},
            }
        }
    }


def put() -> Json:
    return {
        "application/octet-stream": {
            "schema": {"type": "string", "format": "binary"},
        }
    }


def presign(limits: Limits) -> Json:
    schema = {
        "type": "object",
        "required": ["bytes"],
        "additionalProperties": _ABSENT,
        "properties": {
            "bytes": integer(1, limits.max_file_bytes, description="The size of the file"),
            "filename": {"type": ["string", "null"]},
        },
    }
    return {"application/json": {"schema": schema, "example": {"bytes": 1024}}}


def order(limits: Limits) -> Json:
    schema = {
        "type": "object",
        "required": ["endpoint", "completion_window"],
        "additionalProperties": _ABSENT,
        "properties": {
            "endpoint": {"enum": list(ENDPOINTS)},
            "completion_window": {"const": "24h"},
            "input_file_id": {"type": ["string", "null"]},
            "requests": {
                "type": ["array", "null"],
                "minItems": 1,
                "maxItems": limits.max_records,
                "description": "Records as in a file; what is wrong with one is told in `errors`",
            },
            "metadata": {
                "type": ["object", "null"],
                "maxProperties": orders.MAX_PAIRS,
                "propertyNames": {"maxLength": orders.MAX_KEY},
                "additionalProperties": {"type": "string", "maxLength": orders.MAX_VALUE},
            },
            "model": {"type": ["string", "null"], "minLength": 1, "maxLength": orders.MAX_MODEL},
            "priority": {"enum": ["standard", "expedited", None]},
            "output_expires_after": _EXPIRES_AFTER,
        },
        "oneOf": [
            {
                "required": ["input_file_id"],
                "properties": {"input_file_id": {"type": "string"}, "requests": {"type": "null"}},
            },
            {
                "required": ["requests"],
                "properties": {"requests": {"type": "array"}, "input_file_id": {"type": "null"}},
            },
        ],
    }
    return {"application/json": {"schema": schema, "example": _EXAMPLE}}
