"""Takes a valid record apart without changing a byte that is kept."""

from __future__ import annotations

import json

import msgspec
from msgspec import UNSET, UnsetType

from schemas.lines import InputLine

_WHITESPACE = " \t\n\r"
_SKIPPER = json.JSONDecoder(parse_int=str, parse_float=str)
"""Finds the end of a value; numbers are left alone, so that none is too long."""


class _Extension(msgspec.Struct):
    openrelay: msgspec.Raw | UnsetType = UNSET


_LINE = msgspec.json.Decoder(InputLine)
_BODY = msgspec.json.Decoder(_Extension)


def split_body(line: bytes) -> tuple[str, bytes, bytes | None]:
    """custom_id, body without its top-level `openrelay`, and the bytes of `openrelay` (None when absent).

    `line` is a record that passed validation: strict JSON, no key twice, nesting bounded.
    """
    record = _LINE.decode(line)
    body = bytes(record.body)
    extension = _BODY.decode(body).openrelay
    if isinstance(extension, UnsetType):
        return record.custom_id, body, None
    return record.custom_id, without_member(body, "openrelay"), bytes(extension)


def without_member(data: bytes, name: str) -> bytes:
    """The bytes of a JSON object without one of its members and the comma that went with it."""
    text = data.decode()
    position = _skip(text, 0) + 1
    before = position
    while True:
        start = _skip(text, position)
        key, position = _SKIPPER.raw_decode(text, start)
        value = _skip(text, _skip(text, position) + 1)
        end = _SKIPPER.raw_decode(text, value)[1]
        comma = _skip(text, end)
        if key == name:
            break
        before, position = end, comma + 1
    first = text[before - 1] == "{" and text[:before].strip(_WHITESPACE) == "{"
    if text[comma] == "," and first:
        return (text[:start] + text[_skip(text, comma + 1) :]).encode()
    return (text[: start if first else before] + text[end:]).encode()


def with_model(data: bytes, model: str) -> bytes:
    """The bytes of a JSON object with another value for its member `model`; unchanged when it has none."""
    text = data.decode()
    position = _skip(text, 0) + 1
    while text[_skip(text, position)] == '"':
        key, position = _SKIPPER.raw_decode(text, _skip(text, position))
        value = _skip(text, _skip(text, position) + 1)
        end = _SKIPPER.raw_decode(text, value)[1]
        if key == "model":
            return (text[:value] + json.dumps(model) + text[end:]).encode()
        position = _skip(text, end) + 1
        if text[position - 1] == "}":
            break
    return data


def _skip(text: str, position: int) -> int:
    """The next position that is not whitespace."""
    while text[position] in _WHITESPACE:
        position += 1
    return position
