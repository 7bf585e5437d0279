"""The little of ClickHouse's Native format that we write ourselves."""

import json


def empty_block(described: bytes) -> bytes:
    """A block without rows, from the JSONCompactEachRow answer to DESCRIBE (name and type come first)."""
    columns = [json.loads(line)[:2] for line in described.splitlines()]
    parts = [_varint(len(columns)), _varint(0)]
    for name, kind in columns:
        parts += [_text(name), _text(kind)]
    return b"".join(parts)


def _text(value: str) -> bytes:
    encoded = value.encode()
    return _varint(len(encoded)) + encoded


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])
