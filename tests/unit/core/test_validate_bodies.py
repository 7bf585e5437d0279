"""A record taken apart keeps every byte that is kept."""

from __future__ import annotations

import pytest

from streams.core.bodies import split_body


def split(body: bytes) -> tuple[bytes, bytes | None]:
    custom_id, rest, openrelay = split_body(b'{"custom_id":"a\\u00e9","x":1,"body": ' + body + b" }")
    assert custom_id == "aé"
    return rest, openrelay


@pytest.mark.parametrize(
    "body",
    [
        b'{ "a" : 1.10 ,"b":[ 1,2 ], "c":"\\u00e9\xc3\xa9" }',
        b'{"n":' + b"9" * 6_000 + b',"e":1E5,"f":-0.0,"g":[-1E400]}',
        b'{"messages":[{"openrelay":{"x":1}}]}',
        b'{"a":"openrelay"}',
        b'{"open\\u0072elayed":1}',
        b"{}",
    ],
)
def test_without_openrelay_nothing_changes(body: bytes) -> None:
    assert split(body) == (body, None)


@pytest.mark.parametrize(
    ("body", "rest"),
    [
        (b'{"openrelay":{"x": 1}}', b"{}"),
        (b'{ "openrelay" : {"x": 1} }', b"{  }"),
        (b'{"openrelay":{"x": 1},"a":1}', b'{"a":1}'),
        (b'{ "openrelay":{"x": 1} , "a":1}', b'{ "a":1}'),
        (b'{"a":1,"openrelay":{"x": 1}}', b'{"a":1}'),
        (b'{"a":1 , "openrelay":{"x": 1} }', b'{"a":1 }'),
        (b'{"a":1, "openrelay":{"x": 1}, "b": 2}', b'{"a":1, "b": 2}'),
        (b'{"a":1,"o\\u0070enrelay":{"x": 1},"b":2}', b'{"a":1,"b":2}'),
        (
            b'{"s":"},{\\"openrelay\\"","openrelay":{"x": 1},"b":[{"openrelay":2}]}',
            b'{"s":"},{\\"openrelay\\"","b":[{"openrelay":2}]}',
        ),
        (b'{"n":' + b"9" * 6_000 + b',"openrelay":{"x": 1}}', b'{"n":' + b"9" * 6_000 + b"}"),
        ('{"é😀":"é😀","openrelay":{"x": 1},"z":"😀"}'.encode(), '{"é😀":"é😀","z":"😀"}'.encode()),
    ],
)
def test_only_openrelay_goes(body: bytes, rest: bytes) -> None:
    assert split(body) == (rest, b'{"x": 1}')
