"""Takes JSON objects apart, and changes them, without touching a byte that is kept.

Requests come from customers and answers from servers we do not know, so nothing here recurses: however deep
a value is nested, its end is found by counting brackets outside strings. What is scanned is known to be JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from schemas.lines import InputLine

_SPACE = re.compile(rb"[ \t\r\n]*+")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_SCALAR = re.compile(rb"[^ \t\r\n,\]}]*+")
_NESTING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]', re.DOTALL)


class _Extension(msgspec.Struct):
    openrelay: msgspec.Raw | UnsetType = UNSET


_LINE = msgspec.json.Decoder(InputLine)
_BODY = msgspec.json.Decoder(_Extension)
_KEYS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Member(NamedTuple):
    """One member of an object: its key, where that begins, and where its value begins and ends."""

    key: str
    start: int
    value: int
    end: int


def split_body(line: bytes) -> tuple[str, bytes, bytes | None]:
    """custom_id, body without its top-level `openrelay`, and the bytes of `openrelay` (None when absent).

    `line` is a record that passed validation: strict JSON, no key twice, nesting bounded.
    """
    custom_id, body, openrelay = _parts(line)
    return custom_id, body if openrelay is None else without_member(body, "openrelay"), openrelay


def heading(line: bytes) -> tuple[str, bool]:
    """custom_id, and whether the record is a workflow; `line` as for `split_body`."""
    custom_id, _, openrelay = _parts(line)
    return custom_id, openrelay is not None and is_workflow(openrelay)


def is_workflow(openrelay: bytes) -> bool:
    """Whether an `openrelay` object that passed validation is that of a workflow."""
    return "workflow" in _KEYS.decode(openrelay)


def _parts(line: bytes) -> tuple[str, bytes, bytes | None]:
    record = _LINE.decode(line)
    body = bytes(record.body)
    openrelay = _BODY.decode(body).openrelay
    return record.custom_id, body, None if isinstance(openrelay, UnsetType) else bytes(openrelay)


def members(data: bytes) -> Iterator[Member]:
    """The members of a JSON object, in order."""
    position = _skip(data, _skip(data, 0) + 1)
    while data[position : position + 1] == b'"':
        start, after_key = position, _string_end(data, position)
        value = _skip(data, _skip(data, after_key) + 1)
        end = _value_end(data, value)
        yield Member(json.loads(data[start:after_key]), start, value, end)
        position = _skip(data, end)
        if data[position : position + 1] == b",":
            position = _skip(data, position + 1)


def without_member(data: bytes, name: str) -> bytes:
    """The bytes of a JSON object without one of its members and the comma that went with it."""
    before = None
    for member in members(data):
        if member.key == name:
            comma = _skip(data, member.end)
            if before is None and data[comma : comma + 1] == b",":
                return data[: member.start] + data[_skip(data, comma + 1) :]
            return data[: member.start if before is None else before] + data[member.end :]
        before = member.end
    return data


def with_members(data: bytes, values: Mapping[str, bytes]) -> bytes:
    """The bytes of a JSON object with these members: replaced where they are, else added at its end.

    A key that is there twice is replaced twice, so that all readers read the same.
    """
    parts: list[bytes] = []
    done = 0
    last = None
    missing = dict(values)
    for member in members(data):
        last = member.end
        if member.key in values:
            parts += [data[done : member.value], values[member.key]]
            done = member.end
            missing.pop(member.key, None)
    if missing:
        added = b",".join(json.dumps(key).encode() + b":" + value for key, value in missing.items())
        at = _skip(data, 0) + 1 if last is None else last
        parts += [data[done:at], added if last is None else b"," + added]
        done = at
    return b"".join([*parts, data[done:]])


def with_model(data: bytes, model: str) -> bytes:
    """The bytes of a JSON object with another value for its member `model`; unchanged when it has none."""
    if any(member.key == "model" for member in members(data)):
        return with_members(data, {"model": json.dumps(model).encode()})
    return data


def with_model_said(data: bytes, name: str, model: str) -> bytes:
    """The body of a refusal, JSON or text, which says `model` where it speaks of a model of that name.

    That is the value of any member `model`, and the name in quotes, as servers put it in their sentences. A
    name that stands there bare may be any word.
    """
    said, meant = json.dumps(name)[1:-1].encode(), json.dumps(model)[1:-1].encode()
    return re.sub(
        rb'(?P<before>"model"\s*:\s*"|(?P<quote>[`\']|\\"))'
        + re.escape(said)
        + rb'(?=(?(quote)(?P=quote)|"))',
        lambda match: match["before"] + meant,
        data,
    )


def with_appended(data: bytes, name: str, items: Iterable[bytes]) -> bytes | None:
    """The bytes of an object with `items` at the end of its list `name`; None when it has no such list."""
    for member in members(data):
        if member.key == name and data[member.value : member.value + 1] == b"[":
            closing = member.end - 1
            empty = _skip(data, member.value + 1) == closing
            parts = [data[:closing]]
            for item in items:
                parts += [b"" if empty and len(parts) == 1 else b",", item]
            return b"".join([*parts, data[closing:]])
    return None


def _value_end(data: bytes, start: int) -> int:
    first = data[start : start + 1]
    if first == b'"':
        return _string_end(data, start)
    if first not in (b"[", b"{"):
        scalar = _SCALAR.match(data, start)
        assert scalar is not None, "an empty match is a match"
        return scalar.end()
    nesting = 0
    for token in _NESTING.finditer(data, start):
        match data[token.start()]:
            case 0x5B | 0x7B:
                nesting += 1
            case 0x5D | 0x7D:
                nesting -= 1
                if not nesting:
                    return token.end()
    raise ValueError("not JSON: a bracket is not closed")


def _string_end(data: bytes, start: int) -> int:
    string = _STRING.match(data, start)
    if string is None:
        raise ValueError("not JSON: a string is not closed")
    return string.end()


def _skip(data: bytes, position: int) -> int:
    """The next position that is not whitespace."""
    space = _SPACE.match(data, position)
    assert space is not None, "an empty match is a match"
    return space.end()
