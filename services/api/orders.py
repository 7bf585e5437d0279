"""What a create request asks for, checked field by field."""

from __future__ import annotations

from collections.abc import Sized

import msgspec

from schemas.batches import ENDPOINTS
from schemas.facts import Priority
from services.api import queries, refusals
from services.api.refusals import Refusal
from streams.core.strictjson import NotJson, parse

FIELDS = (
    "endpoint",
    "completion_window",
    "input_file_id",
    "requests",
    "metadata",
    "model",
    "priority",
    "output_expires_after",
)
MAX_PAIRS, MAX_KEY, MAX_VALUE = 16, 64, 512
MAX_MODEL = 256
LEAST_TTL_S, MOST_TTL_S = 3_600, 2_592_000


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A create request that is fine in itself. `input_file_id` is None when it carries its records."""

    endpoint: str
    completion_window: str
    input_file_id: str | None
    metadata: dict[str, str] | None
    model: str | None
    priority: Priority
    result_ttl_s: int


def read(raw: dict[str, bytes], items: Sized | None, default_ttl_s: int) -> Order:
    """From the JSON of each field and the inline records, if any; raises Refusal naming the field."""
    fields = _parsed(raw)
    queries.only_known(fields, *FIELDS)
    if "requests" in fields:
        raise refusals.invalid("requests must be an array of records.", "requests")
    _check_source(fields, items)
    endpoint = _one_of(fields, "endpoint", ENDPOINTS)
    window = _one_of(fields, "completion_window", ("24h",))
    return Order(
        endpoint=endpoint,
        completion_window=window,
        input_file_id=_text(fields, "input_file_id"),
        metadata=_metadata(fields.get("metadata")),
        model=_model(fields),
        priority=Priority(_one_of({"priority": "standard"} | fields, "priority", ("standard", "expedited"))),
        result_ttl_s=_ttl(fields.get("output_expires_after"), default_ttl_s),
    )


def _parsed(raw: dict[str, bytes]) -> dict[str, object]:
    fields = {}
    for key, text in raw.items():
        try:
            value = parse(text)
        except NotJson as error:
            raise refusals.invalid(f"The field {key[:64]!r} {error}.") from None
        if value is not None:
            fields[key] = value
    return fields


def _check_source(fields: dict[str, object], items: Sized | None) -> None:
    if ("input_file_id" in fields) == (items is not None):
        raise refusals.invalid("Give either input_file_id or requests.", "input_file_id")
    if items is not None and len(items) == 0:
        raise refusals.invalid("requests holds no record.", "requests")


def _one_of(fields: dict[str, object], name: str, known: tuple[str, ...]) -> str:
    if name not in fields:
        raise refusals.invalid(f"{name} is required.", name, "missing_required_parameter")
    value = fields[name]
    if not isinstance(value, str) or value not in known:
        raise _wrong(name, f"must be {' or '.join(repr(each) for each in known)}")
    return value


def _text(fields: dict[str, object], name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise _wrong(name, "must be a string")
    return value


def _model(fields: dict[str, object]) -> str | None:
    model = _text(fields, "model")
    if model is not None and not 0 < len(model) <= MAX_MODEL:
        raise _wrong("model", f"must have 1 to {MAX_MODEL} characters")
    return model


def _metadata(value: object) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise _wrong("metadata", "must be an object of strings")
    if len(value) > MAX_PAIRS:
        raise _wrong("metadata", f"has more than {MAX_PAIRS} pairs")
    for key, each in value.items():
        if len(key) > MAX_KEY:
            raise _wrong("metadata", f"has a key of more than {MAX_KEY} characters")
        if not isinstance(each, str) or len(each) > MAX_VALUE:
            raise _wrong("metadata", f"must have strings of at most {MAX_VALUE} characters as values")
    return value


def _ttl(value: object, default: int) -> int:
    name = "output_expires_after"
    if value is None:
        return default
    if not isinstance(value, dict) or set(value) - {"anchor", "seconds"}:
        raise _wrong(name, "must be an object with anchor and seconds")
    if value.get("anchor") != "created_at":
        raise _wrong(f"{name}.anchor", 'must be "created_at"')
    seconds = queries.whole(value.get("seconds"))
    if seconds is None or not LEAST_TTL_S <= seconds <= MOST_TTL_S:
        raise _wrong(f"{name}.seconds", f"must be an integer from {LEAST_TTL_S} to {MOST_TTL_S}")
    return seconds


def _wrong(name: str, why: str) -> Refusal:
    return refusals.invalid(f"{name} {why}.", name, "invalid_value")
