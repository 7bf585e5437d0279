"""Create requests that carry their records."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.api import inline
from streams.core.strictjson import NotJson
from tests.api.host import CHAT, create, error


def post_raw(
    client: httpx.Client, requests: bytes, before: bytes = b"", after: bytes = b""
) -> httpx.Response:
    fields = json.dumps({"endpoint": CHAT, "completion_window": "24h"}).encode()[1:-1]
    return client.post(
        "/v1/batches", content=b"{" + before + fields + b',"requests":' + requests + after + b"}"
    )


def test_they_become_a_file(client: httpx.Client) -> None:
    items = [
        {"custom_id": "a", "body": {"model": "m"}},
        {"custom_id": "b", "method": "POST", "url": CHAT, "body": {"model": "m", "é": "😀\u2028"}},
        {"custom_id": "c", "url": CHAT, "body": {"model": "m"}},
    ]
    batch = create(client, requests=items)
    file = client.get(f"/v1/files/{batch['input_file_id']}").json()
    assert file["purpose"] == "batch"
    lines = client.get(f"/v1/files/{file['id']}/content").content.splitlines()
    assert [json.loads(line) for line in lines] == [{"method": "POST", "url": CHAT} | item for item in items]
    assert batch["errors"] is None
    again = create(client, input_file_id=file["id"])
    assert again["errors"] is None
    assert client.delete(f"/v1/files/{file['id']}").status_code == 409


def test_bodies_keep_their_bytes(client: httpx.Client) -> None:
    body = (
        b'{"model":"m", "n" : 1.10,"big":123456789012345678901234567890, '
        b'"s":"\\u00e9\xc3\xa9\\n" ,\r\n\t"x":[ 1 ]}'
    )
    item = b' {"custom_id":"a",\n"body":' + body + b"} "
    answer = post_raw(client, b"[" + item + b"]", b'"metadata" : {"a":"b"} , ')
    assert answer.status_code == 200
    content = client.get(f"/v1/files/{answer.json()['input_file_id']}/content").content
    assert content.count(b"\n") == 1
    assert body.replace(b"\n", b"\t") in content


def test_rejected_records_name_their_position(client: httpx.Client) -> None:
    items = [
        b'{"custom_id":"a","body":{"model":"m"}}',
        b'{"custom_id":"b","body":{"model":"m","x":NaN}}',
        b"7",
        b'{"custom_id":"a","body":{"model":"m"}}',
        b'{"custom_id":"c","method":"GET","body":{"model":"m"}}',
        b'{"custom_id":"d","custom_id":"d","body":{"model":"m"}}',
        b'{"custom_id":"e","method":null,"method":null,"body":{"model":"m"}}',
        b"{}",
        b"null",
        b'{"custom_id":"f","body":{"model":"m","x":"\\ud800"}}',
        b'{"custom_id":"g","body":{"model":"m","x":"\xff"}}',
        b'{"custom_id":"h","body":{"model":"m","x":' + b"[" * 99 + b"]" * 99 + b"}}",
        b'{"custom_id":"i","body":{"model":"m","x":' + b"[" * 100_001 + b"]" * 100_001 + b"}}",
        b'{"custom_id":"j" "body":{"model":"m"}}',
        b'{"custom_id":"k","body":{"model":"m"}}',
        b'{"custom_id":"l","body":{"model":"m","x":"two\nlines"}}',
    ]
    answer = post_raw(client, b"[" + b" ,\n".join(items) + b"]")
    assert answer.status_code == 200, answer.text
    assert [(each["line"], each["code"]) for each in answer.json()["errors"]["data"]] == [
        (2, "invalid_json"),
        (3, "invalid_record"),
        (4, "duplicate_custom_id"),
        (5, "invalid_method"),
        (6, "invalid_json"),
        (7, "invalid_json"),
        (8, "invalid_custom_id"),
        (9, "invalid_record"),
        (10, "invalid_json"),
        (11, "invalid_json"),
        (12, "invalid_json"),
        (13, "invalid_json"),
        (14, "invalid_json"),
        (16, "invalid_json"),
    ]


@pytest.mark.parametrize("pad", [0, 100_000])
@pytest.mark.parametrize(
    "item",
    [b"\xff\xfe", b"\xfe\xff", b"\xff\xfe{\x00}\x00", b'\xef\xbb\xbf{"custom_id":"a","body":{"model":"m"}}'],
)
def test_byte_order_marks_concern_their_record_alone(client: httpx.Client, item: bytes, pad: int) -> None:
    good = json.dumps({"custom_id": "b", "body": {"model": "m", "pad": "x" * pad}}).encode()
    answer = post_raw(client, b"[" + item + b"," + good + b"]")
    assert answer.status_code == 200, answer.text
    assert [(each["line"], each["code"]) for each in answer.json()["errors"]["data"]] == [(1, "invalid_json")]
    again = create(client, input_file_id=answer.json()["input_file_id"])
    assert again["errors"] == answer.json()["errors"]


def test_null_is_left_out(client: httpx.Client) -> None:
    items = [
        b'{"custom_id":"a" , "method" : null ,"body":{"model":"m","method":null,"url": null}}',
        b'{"url":null,"custom_id":"b","method":"POST","body":{"model":"m"},"requests":[null, null]}',
        b'{"custom_id":"c","body":{"model":"m"},"m\\u0065thod":null,"url":null}',
    ]
    answer = post_raw(client, b"[" + b",".join(items) + b"]")
    assert answer.status_code == 200, answer.text
    assert answer.json()["errors"] is None
    content = client.get(f"/v1/files/{answer.json()['input_file_id']}/content").content
    first, second, third = map(json.loads, content.splitlines())
    assert {(each["method"], each["url"]) for each in (first, second, third)} == {("POST", CHAT)}
    assert b'"body":{"model":"m","method":null,"url": null}}' in content
    assert second["requests"] == [None, None]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"null", "The body is not a JSON object."),
        (b"[]", "The body is not a JSON object."),
        (b"", "The body is not a JSON object."),
        (b"{", "The body is not JSON: it ends early."),
        (b"{" + b" " * 2_000_000, "The body is not JSON: it ends early."),
        (b'{"model":1,"model":2}', "The body has the key 'model' twice in one object."),
        (b'{"model":NaN}', "The field 'model' contains NaN, which is not JSON."),
        (b'{"model":"\xff"}', "The field 'model' is not UTF-8 at byte 2."),
    ],
)
def test_what_is_wrong_with_the_body_is_a_sentence(client: httpx.Client, body: bytes, message: str) -> None:
    answer = client.post("/v1/batches", content=body)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


@pytest.mark.parametrize("pad", [0, 2_000])
def test_number_of_records(client: httpx.Client, pad: int) -> None:
    item = json.dumps({"custom_id": "a", "body": {"model": "m", "pad": "x" * pad}}).encode()
    if not pad:
        assert (
            len(post_raw(client, b"[" + b",".join([item] * 50_000) + b"]").json()["errors"]["data"]) == 49_999
        )
    answer = post_raw(client, b"[" + b",".join([item] * 50_001) + b"]")
    assert answer.status_code == 400
    assert error(answer)["code"] == "too_many_records"


def test_a_record_over_the_limit_is_rejected_alone(client: httpx.Client) -> None:
    large = b'{"custom_id":"a","body":{"model":"m","x":"' + b"y" * 16_777_216 + b'"}}'
    answer = post_raw(client, b"[" + large + b',{"custom_id":"b","body":{"model":"m"}}]')
    assert [each["code"] for each in answer.json()["errors"]["data"]] == ["record_too_large"]


def test_refusals_leave_no_file(client: httpx.Client) -> None:
    before = client.get("/v1/files").json()["data"]
    for requests in (b"[1", b"[]", b"[1,]", b'[{"a":1}}]', b"{}"):
        assert post_raw(client, requests).status_code == 400
    assert client.get("/v1/files").json()["data"] == before


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(st.text(max_size=8).filter(lambda key: key != "requests"), values, max_size=4),
    st.none() | st.lists(values, max_size=5),
    st.sampled_from([None, 1]),
    st.booleans(),
)
def test_scanning_finds_what_parsing_finds(
    fields: dict[str, Any], items: list[Any] | None, indent: int | None, ascii_only: bool
) -> None:
    whole = dict(fields) if items is None else fields | {"requests": items}
    body = json.dumps(whole, indent=indent, ensure_ascii=ascii_only).encode()
    envelope = inline.scan(body, 10)
    assert {key: json.loads(value) for key, value in envelope.fields.items()} == fields
    if items is None:
        assert envelope.items is None
    else:
        assert envelope.items is not None
        assert [json.loads(body[start:end]) for start, end in envelope.items] == items
        lines = [inline.line(body[start:end], CHAT) for start, end in envelope.items]
        assert not any(b"\n" in line for line in lines)
        for line, item in zip(lines, items, strict=True):
            added = {"method": "POST", "url": CHAT} if isinstance(item, dict) else {}
            assert json.loads(line) == (added | item if isinstance(item, dict) else item)


@settings(max_examples=500, deadline=None)
@given(st.text(alphabet='{}[]",:\\ 1ab\n', max_size=30))
def test_scanning_takes_whatever_is_valid_and_never_fails_otherwise(text: str) -> None:
    for body in (text.encode(), b'{"requests":' + text.encode() + b"}"):
        try:
            expected = json.loads(body)
        except ValueError:
            expected = None
        try:
            envelope = inline.scan(body, 100)
        except NotJson:
            assert not isinstance(expected, dict) or len(json.loads(body, object_pairs_hook=list)) > len(
                expected
            )
        else:
            if isinstance(expected, dict) and isinstance(expected.get("requests"), list):
                assert envelope.items is not None
                assert [json.loads(body[a:b]) for a, b in envelope.items] == expected["requests"]


def test_too_many_items() -> None:
    with pytest.raises(inline.TooManyItems):
        inline.scan(b'{"requests":[1,2,3]}', 2)
    assert inline.scan(b'{"requests":[1,2,3]}', 3).items is not None
