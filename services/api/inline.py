"""A create request that carries its records: finding them in a body of up to 200 MB without parsing it.

The scanner knows strings, brackets, commas and colons, and finds where each top-level field and each item of
`requests` begins and ends. What is between is judged later: small fields by the strict parser, each item as
the line of an input file it becomes. So one bad record rejects itself and not the others.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Iterator

import msgspec
from msgspec import UNSET, UnsetType

from streams.core.strictjson import NotJson, parse

MAX_FIELDS_BYTES = 256 * 1024
"""All fields but `requests` together."""
MAX_DEPTH = 1_000_000
"""Of brackets followed in a record; deeper than 100 it is rejected anyway, once it is a line."""

Buffer = bytes | mmap.mmap

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_TOKEN = re.compile(_STRING + rb'|["\[\]{},:]', re.DOTALL)
_INSIDE = re.compile(rb'(?:[^"\[\]{}]++|' + _STRING + rb")*+", re.DOTALL)
"""Up to the next bracket: what lies between does not matter within a value."""
_SPACE = b" \t\n\r"
_OBJECT = re.compile(rb"[ \t\n\r]*\{")
_CLOSES = {ord("["): ord("]"), ord("{"): ord("}")}


class TooManyItems(Exception):
    """`requests` holds more items than a batch may."""


class Envelope(msgspec.Struct, frozen=True):
    """The JSON of each field but `requests`, and where the items of `requests` lie in the body.

    `items` is None when the field is absent or not an array; then `fields` may hold it.
    """

    fields: dict[str, bytes]
    items: list[tuple[int, int]] | None


class _Shape(msgspec.Struct):
    method: msgspec.Raw | UnsetType = UNSET
    url: msgspec.Raw | UnsetType = UNSET


_shape = msgspec.json.Decoder(_Shape)


def scan(body: Buffer, max_items: int) -> Envelope:
    """Take the body apart. Raises NotJson, TooManyItems."""
    scanner = _Scanner(body, max_items)
    fields: dict[str, bytes] = {}
    items = None
    taken = 0
    for key, start, end in scanner.members():
        if key in fields or (key == "requests" and items is not None):
            raise NotJson(f"has the key {key[:64]!r} twice in one object")
        if key == "requests" and scanner.items is not None:
            items, scanner.items = scanner.items, None
            continue
        taken += end - start
        if taken > MAX_FIELDS_BYTES:
            raise NotJson("is too large outside of requests")
        fields[key] = bytes(body[start:end])
    return Envelope(fields, items)


def line(item: bytes, endpoint: str) -> bytes:
    """The line of an input file for one item; `method` and `url` are added where they are left out or null.

    Line ends inside an item become tabs, which are white space between its parts as they are and, as they
    are, not allowed in a string: what was not JSON before is not JSON after. What is no object gets a space
    in front, so that no item is taken for the byte order mark of the whole file.
    """
    text = item.replace(b"\n", b"\t")
    if not text.startswith(b"{"):
        return b" " + text
    try:
        shape = _shape.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return text
    defaults = {"method": "POST", "url": endpoint}
    given = {"method": shape.method, "url": shape.url}
    nulls = {name: defaults[name] for name, value in given.items() if value == msgspec.Raw(b"null")}
    if nulls:
        text = _instead_of_nulls(text, nulls)
    added = {name: defaults[name] for name, value in given.items() if isinstance(value, UnsetType)}
    if not added:
        return text
    rest = text[1:]
    comma = b"" if rest.lstrip(_SPACE).startswith(b"}") else b","
    return json.dumps(added, separators=(",", ":")).encode()[:-1] + comma + rest


def _instead_of_nulls(text: bytes, values: dict[str, str]) -> bytes:
    """The object with these values for members that are null; every other byte stays."""
    parts, copied = [], 0
    try:
        for key, start, end in _Scanner(text, len(text)).members():
            if key in values and text[start:end].strip(_SPACE) == b"null":
                parts += [text[copied:start], json.dumps(values[key]).encode()]
                copied = end
    except NotJson:  # msgspec takes a key twice, which makes it no record anyway
        return text
    return b"".join(parts) + text[copied:]


class _Scanner:
    def __init__(self, body: Buffer, max_items: int) -> None:
        self._body = body
        self._max_items = max_items
        self._end = 0
        """Of the token taken last."""
        self.items: list[tuple[int, int]] | None = None
        """Of the member just yielded, when it is the array `requests`."""

    def members(self) -> Iterator[tuple[str, int, int]]:
        """Each member of the top-level object: its key and where its value begins and ends."""
        if _OBJECT.match(self._body) is None:
            raise NotJson("is not a JSON object")
        _, closing = self._take(b"{")
        first = True
        while True:
            start, token = self._next()
            self._only_space(closing, start)
            if first and token == b"}":
                break
            if not token.startswith(b'"') or len(token) < 2:
                raise NotJson(f"is not JSON: a key is missing at byte {start + 1}")
            key = parse(token)
            assert isinstance(key, str)
            _, value = self._take(b":")
            if key == "requests":
                end, token = self._array(value)
            else:
                self.items = None
                end, token = self._value(value)
            yield key, value, end
            closing, first = self._end, False
            if token == b"}":
                break
            if token != b",":
                raise NotJson(f"is not JSON: a comma is missing at byte {end + 1}")
        if bytes(self._body[self._end :]).strip(_SPACE):
            raise NotJson(f"is not JSON: there is more after byte {self._end}")

    def _array(self, start: int) -> tuple[int, bytes]:
        """Like `_value`, noting the items when the value is an array."""
        self.items = None
        begin, token = self._next()
        if token != b"[":
            return self._value(start, (begin, token))
        self._only_space(start, begin)
        self.items = []
        while True:
            item = self._end
            end, token = self._value(item)
            while item < end and self._body[item] in _SPACE:
                item += 1
            empty = item == end
            if empty and (token == b"," or self.items):
                raise NotJson(f"is not JSON: a value is missing at byte {end + 1}")
            if not empty:
                self.items.append((item, end))
                if len(self.items) > self._max_items:
                    raise TooManyItems
            if token == b"]":
                break
            if token != b",":
                raise NotJson(f"is not JSON: a comma is missing at byte {end + 1}")
        after = self._end
        close, token = self._next()
        self._only_space(after, close)
        return close, token

    def _value(self, start: int, taken: tuple[int, bytes] | None = None) -> tuple[int, bytes]:
        """Skip one value from `start`; where it ends and the token after it: `,`, `}` or `]`."""
        stack = bytearray()
        while True:
            if stack:
                inside = _INSIDE.match(self._body, self._end)
                assert inside is not None
                self._end = inside.end()
            position, token = self._next() if taken is None else taken
            taken = None
            byte = token[0]
            if byte in _CLOSES:
                stack.append(_CLOSES[byte])
                if len(stack) > MAX_DEPTH:
                    raise NotJson("is nested too deeply")
            elif not stack and byte in b",]}":
                return position, token
            elif byte in b"]}" and stack.pop() != byte:
                raise NotJson(f"is not JSON: brackets do not match at byte {position + 1}")
            elif not stack and byte == ord(":"):
                raise NotJson(f"is not JSON: a colon is out of place at byte {position + 1}")

    def _take(self, wanted: bytes) -> tuple[int, int]:
        before = self._end
        start, token = self._next()
        self._only_space(before, start)
        if token != wanted:
            raise NotJson(f"is not JSON: {wanted.decode()} is missing at byte {start + 1}")
        return start, self._end

    def _next(self) -> tuple[int, bytes]:
        match = _TOKEN.search(self._body, self._end)
        if match is None:
            raise NotJson("is not JSON: it ends early")
        token = match[0]
        if token == b'"':
            raise NotJson(f"is not JSON: a string is not closed at byte {match.start() + 1}")
        self._end = match.end()
        return match.start(), token

    def _only_space(self, start: int, end: int) -> None:
        if bytes(self._body[start:end]).strip(_SPACE):
            raise NotJson(f"is not JSON: unexpected text at byte {start + 1}")
