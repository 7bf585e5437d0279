"""Every code of a rejected record, in the order in which they are looked for."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from schemas.records import Rejected
from schemas.settings import Egress, Limits
from streams.core.validate import Accepted, TooManyRecords, UnsupportedEncoding, Validator

CHAT = "/v1/chat/completions"


def rec(custom_id: Any = "a", **changes: Any) -> dict[str, Any]:
    """One valid record, changed; a value of `...` removes the key."""
    record = {
        "custom_id": custom_id,
        "method": "POST",
        "url": CHAT,
        "body": {"model": "m", "messages": []},
    } | changes
    return {key: value for key, value in record.items() if value is not ...}


def body(**changes: Any) -> dict[str, Any]:
    """Changes to `rec` that replace its body; a value of `...` removes the key."""
    content = {"model": "m", "messages": []} | changes
    return {"body": {key: value for key, value in content.items() if value is not ...}}


def run(
    *lines: Any, chunk: int = 1 << 20, end: bytes = b"\n", start: bytes = b"", **options: Any
) -> tuple[Validator, list[Accepted | Rejected]]:
    data = start + b"".join(
        (line if isinstance(line, bytes) else json.dumps(line).encode()) + end for line in lines
    )
    return run_bytes(data, chunk, **options)


def run_bytes(
    data: bytes, chunk: int = 1 << 20, **options: Any
) -> tuple[Validator, list[Accepted | Rejected]]:
    arguments: dict[str, Any] = {
        "endpoint": CHAT,
        "models": {"m", "n"},
        "workflows_enabled": True,
        "egress": Egress(),
        "limits": Limits(),
    }
    validator = Validator(**(arguments | options))
    out: list[Accepted | Rejected] = []
    for position in range(0, len(data), chunk):
        out += validator.feed(data[position : position + chunk])
    return validator, out + list(validator.end())


def codes(*lines: Any, **options: Any) -> list[str | None]:
    return [each.code if isinstance(each, Rejected) else None for each in run(*lines, **options)[1]]


def only(line: Any, **options: Any) -> Rejected:
    (result,) = run(line, **options)[1]
    assert isinstance(result, Rejected)
    return result


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1 << 20])
def test_bom_blank_lines_crlf_and_a_missing_last_newline(chunk: int) -> None:
    lines = [json.dumps(rec(each)).encode() for each in "abc"]
    data = b"\xef\xbb\xbf" + lines[0] + b"\n\n  \t\n" + lines[1] + b"\r\n\r\n" + lines[2]
    validator, out = run_bytes(data, chunk)
    assert [(each.index, each.number, each.custom_id) for each in out if isinstance(each, Accepted)] == [
        (0, 1, "a"),
        (1, 4, "b"),
        (2, 6, "c"),
    ]
    assert [
        data[each.offset : each.offset + each.length] for each in out if isinstance(each, Accepted)
    ] == lines
    assert (validator.total, validator.rejected, validator.model) == (3, 0, "m")


@pytest.mark.parametrize("chunk", [1, 5, 1 << 20])
@pytest.mark.parametrize("order", ["utf-16-le", "utf-16-be"])
def test_utf_16(order: str, chunk: int) -> None:
    bom = {"utf-16-le": b"\xff\xfe", "utf-16-be": b"\xfe\xff"}[order]
    with pytest.raises(UnsupportedEncoding):
        run_bytes(bom + json.dumps(rec()).encode(order), chunk)


@pytest.mark.parametrize("data", [b"", b"\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n \r\n\t", b" ", b"\r"])
def test_no_record(data: bytes) -> None:
    for chunk in (1, 100):
        validator, out = run_bytes(data, chunk)
        assert (validator.total, out) == (0, [])


def test_a_second_bom_is_not_json() -> None:
    line = json.dumps(rec()).encode()
    assert codes(b"\xef\xbb\xbf" + line, start=b"\xef\xbb\xbf") == ["invalid_json"]
    assert codes(rec(), b"\xef\xbb\xbf" + line) == [None, "invalid_json"]


def test_only_byte_0a_ends_a_line() -> None:
    for inside in ("\u2028", "\u2029", "\u0085", "\x7f"):
        line = json.dumps(rec(**body(messages=[inside])), ensure_ascii=False).encode()
        assert codes(line) == [None]
    line = json.dumps(rec()).encode()
    assert codes(line + b"\r" + json.dumps(rec("b")).encode()) == ["invalid_json"]
    assert codes(line.replace(b"{", b"\r{", 1).replace(b": ", b":\r", 1)) == [None]


@pytest.mark.parametrize(
    "line",
    [
        b"x",
        b"{",
        b'{"custom_id": "a"} {}',
        b'{"custom_id": "a",}',
        b"[1,]",
        b"NaN",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": 1e400}',
        b'{"a": [-1E+400]}',
        b'{"a": 1' + b"0" * 400 + b".0}",
        b'{"a": "\x00"}',
        b"\x00",
        b'{"a": "\x01"}',
        b'{"a": "\xff"}',
        b'{"a": "\xc0\xaf"}',
        b'{"a": "\xed\xa0\x80"}',
        b'{"a": "\xf4\x90\x80\x80"}',
        rb'{"a": "\ud800"}',
        rb'{"a": ["\uD800\u0041"]}',
        rb'{"a": "\udc00\ud800"}',
        rb'{"\udfff": 1}',
        rb'{"a": "\x41"}',
        rb'{"a": "\u00g0"}',
        b"{'a': 1}",
        b'{"a": 01}',
        b'{"a": +1}',
        b'{"a": .5}',
        b'{"a": 1.}',
        b'{"a": 0x10}',
        b'{"a": tru}',
        b'{"a": 1} // x',
        b"{a: 1}",
        b'{"a": 1, "a": 2}',
        b'{"a": {"b": [{"c": 1, "c": 1}]}}',
        rb'{"a": 1, "\u0061": 2}',
        b'{"custom_id": "a", "custom_id": "b"}',
        b'{"body": {"openrelay": {}, "openrelay": {}}}',
        "\u00a0{}".encode(),
        b"\x0b{}",
        b"\x1f\x8b\x08\x00gzip",
        b"PK\x03\x04",
        b'{"a":' * 101 + b"1" + b"}" * 101,
        b"[" * 101 + b"]" * 101,
        b"[" * 100_001 + b"]" * 100_001,
        b"[" * 100_001,
        b'{"a":' * 100_001,
        b'"' + b'\\"' * 100_000,
        b"]" * 1000,
    ],
)
def test_invalid_json(line: bytes) -> None:
    rejected = only(line)
    assert rejected.code == "invalid_json"
    assert (rejected.param, rejected.custom_id, rejected.line) == (None, None, 1)
    assert len(rejected.message) < 300
    assert codes(rec(), line, rec("b")) == [None, "invalid_json", None]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"a": "b', "the record is not JSON: Unterminated string starting at character 7"),
        (b'{"a": "\x01"}', "the record is not JSON: Invalid control character at character 8"),
        (b'{"a": 1, "a": 2}', "the record has the key 'a' twice in one object"),
        (b'{"a": NaN}', "the record contains NaN, which is not JSON"),
        (b'{"a": "\xff"}', "the record is not UTF-8 at byte 8"),
        (b"[" * 101 + b"]" * 101, "the record is nested more than 100 levels deep"),
    ],
)
def test_what_is_wrong_with_the_json_is_a_sentence(line: bytes, message: str) -> None:
    assert only(line).message == message


def test_json_at_the_edge_is_fine() -> None:
    assert codes(rec(x=[1])) == [None]
    nested: Any = 1
    for _ in range(99):
        nested = [nested]
    assert codes(rec(x=nested)) == [None]
    assert codes(rec(x=[nested])) == ["invalid_json"]
    brackets_in_strings = "[{" * 500 + '"\\'
    assert codes(rec(x=brackets_in_strings)) == [None]
    assert codes(rec(x=[[]] * 500)) == [None]
    line = json.dumps(rec()).encode()
    for value in (
        b"1" + b"0" * 5_000,
        b"-" + b"9" * 5_000,
        b"1e308",
        b"1" + b"0" * 400,
        b"1e-400",
        b"-0",
        b"12345678901234567890",
    ):
        assert codes(line[:-1] + b', "x": ' + value + b"}") == [None]
    assert codes(line[:-1] + rb', "x": "\ud83d\ude00 \\ud800"}') == [None]
    assert codes(line[:-1] + b', "x": {"a": 1, "A": 2, "b": {"a": 1}}}') == [None]
    assert codes(b" \t" + line + b" \t ") == [None]


@pytest.mark.parametrize("line", [b"[]", b'"x"', b"7", b"null", b"true", b"[{}]"])
def test_invalid_record(line: bytes) -> None:
    rejected = only(line)
    assert (rejected.code, rejected.param, rejected.custom_id) == ("invalid_record", None, None)


@pytest.mark.parametrize(
    "custom_id", [..., None, 7, "", "x" * 513, "a\0", "a\nb", "\x1f", "\x7f", "\x85", ["a"], True]
)
def test_invalid_custom_id(custom_id: Any) -> None:
    rejected = only(rec(custom_id))
    assert (rejected.code, rejected.param, rejected.custom_id) == ("invalid_custom_id", "custom_id", None)


@pytest.mark.parametrize("custom_id", ["x" * 512, "😀" * 512, " ", "\u2028", "../../x", "ключ"])
def test_valid_custom_id(custom_id: str) -> None:
    (accepted,) = run(rec(custom_id))[1]
    assert isinstance(accepted, Accepted)
    assert accepted.custom_id == custom_id


def test_duplicate_custom_id() -> None:
    _, out = run(rec("x"), rec("y"), rec("x", method="GET"), rec("x"))
    duplicates = [each for each in out if isinstance(each, Rejected)]
    assert [(each.line, each.code, each.custom_id) for each in duplicates] == [
        (3, "duplicate_custom_id", "x"),
        (4, "duplicate_custom_id", "x"),
    ]


def test_the_next_use_runs_when_the_first_was_rejected() -> None:
    assert codes(rec("x", method="GET"), rec("x"), rec("x")) == [
        "invalid_method",
        None,
        "duplicate_custom_id",
    ]


def test_ids_that_only_look_equal_are_distinct() -> None:
    assert codes(rec("é"), rec("e\u0301"), rec("A"), rec("a"), rec("ﬁ"), rec("fi")) == [None] * 6


@pytest.mark.parametrize("method", [..., "GET", "post", "POST ", None, 1])
def test_invalid_method(method: Any) -> None:
    rejected = only(rec(method=method))
    assert (rejected.code, rejected.param, rejected.custom_id) == ("invalid_method", "method", "a")


@pytest.mark.parametrize(
    "url",
    [
        ...,
        "/v1/completions",
        "https://api.openai.com/v1/chat/completions",
        "v1/chat/completions",
        "",
        None,
        CHAT + "/",
    ],
)
def test_url_mismatch(url: Any) -> None:
    rejected = only(rec(url=url))
    assert (rejected.code, rejected.param) == ("url_mismatch", "url")


@pytest.mark.parametrize("value", [..., None, "x", [], 1, True])
def test_invalid_body(value: Any) -> None:
    rejected = only(rec(body=value))
    assert (rejected.code, rejected.param) == ("invalid_body", "body")


def test_unknown_keys_of_the_record_are_ignored() -> None:
    assert codes(rec(extra={"deep": [1]}, id="x")) == [None]


@pytest.mark.parametrize("model", [..., None, "", 7, ["m"]])
def test_missing_model(model: Any) -> None:
    rejected = only(rec(**body(model=model)))
    assert (rejected.code, rejected.param) == ("missing_model", "body.model")


def test_models() -> None:
    validator, out = run(
        rec("1", **body(model="unknown")),
        rec("2", **body(model="n", stream=True)),
        rec("3", method="GET"),
        rec("4"),
        rec("5", **body(model="n")),
        rec("6", **body(model="unknown")),
        rec("7"),
    )
    assert [each.code if isinstance(each, Rejected) else None for each in out] == [
        "model_not_found",
        "stream_not_supported",
        "invalid_method",
        None,
        "model_mismatch",
        "model_mismatch",
        None,
    ]
    assert validator.model == "m"
    assert (validator.total, validator.rejected) == (7, 5)


def test_no_model_is_settled_when_nothing_is_accepted() -> None:
    assert run(rec(**body(stream=True)))[0].model is None


@pytest.mark.parametrize("stream", [False, None, ..., "true"])
def test_stream_other_than_true_is_the_model_servers_business(stream: Any) -> None:
    assert codes(rec(**body(stream=stream))) == [None]


def test_stream() -> None:
    rejected = only(rec(**body(stream=True)))
    assert (rejected.code, rejected.param) == ("stream_not_supported", "body.stream")


def test_malformed_lines_are_all_named() -> None:
    lines = [
        rec("ok"),
        b"not json",
        b"[]",
        rec("c", method=...),
        rec("d", url="/v1/completions"),
        rec("e", body="text"),
    ]
    validator, out = run(*lines)
    assert (validator.total, validator.rejected) == (6, 5)
    assert [
        (each.line, each.code, each.param, each.custom_id) for each in out if isinstance(each, Rejected)
    ] == [
        (2, "invalid_json", None, None),
        (3, "invalid_record", None, None),
        (4, "invalid_method", "method", "c"),
        (5, "url_mismatch", "url", "d"),
        (6, "invalid_body", "body", "e"),
    ]


def test_the_first_code_in_order_decides() -> None:
    everything = {
        "custom_id": "a",
        "method": "GET",
        "url": "/",
        "body": {"tool_config": 1, "openrelay": {"x": 1}, "model": "?", "stream": True},
    }
    steps: list[tuple[str, Any]] = [
        ("invalid_method", lambda r: r.update(method="POST")),
        ("url_mismatch", lambda r: r.update(url=CHAT)),
        ("tool_config_moved", lambda r: r["body"].pop("tool_config")),
        ("invalid_openrelay", lambda r: r["body"].update(openrelay={"tool_config": {}})),
        ("invalid_tool_config", lambda r: r["body"].update(openrelay={"workflow": {}})),
        (
            "invalid_workflow",
            lambda r: r["body"].update(openrelay={"workflow": {"url": "https://x.example"}}),
        ),
        ("workflow_not_enabled", lambda r: r["body"].pop("openrelay")),
        ("model_not_found", lambda r: r["body"].update(model="m")),
        ("stream_not_supported", lambda r: r["body"].update(stream=False)),
    ]
    for code, repair in steps:
        assert codes(everything, workflows_enabled=False) == [code]
        repair(everything)
    assert codes(everything, workflows_enabled=False) == [None]


def test_too_many_records() -> None:
    limits = Limits(max_records=3)
    assert codes(*[rec(str(each)) for each in range(3)], limits=limits) == [None] * 3
    with pytest.raises(TooManyRecords):
        run(*[rec(str(each)) for each in range(4)], limits=limits)


@pytest.mark.parametrize("chunk", [1, 3, 16, 1 << 20])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_record_too_large(chunk: int, end: bytes) -> None:
    line = json.dumps(rec()).encode()
    limits = Limits(max_record_bytes=len(line))
    assert codes(line, line + b" ", rec("b"), chunk=chunk, end=end, limits=limits) == [
        None,
        "record_too_large",
        None,
    ]
    last = run_bytes(line + b" ", chunk, limits=limits)[1]
    assert [each.code for each in last if isinstance(each, Rejected)] == ["record_too_large"]


def test_a_long_blank_line_is_no_record() -> None:
    limits = Limits(max_record_bytes=1_000)
    _, out = run(b" " * 5_000, rec(), b"\t" * 5_000, chunk=100, limits=limits)
    assert [each.number for each in out if isinstance(each, Accepted)] == [2]


def test_memory_is_flat_for_one_endless_line() -> None:
    limits = Limits(max_record_bytes=1_000_000)
    validator = Validator(
        endpoint=CHAT, models={"m"}, workflows_enabled=False, egress=Egress(), limits=limits
    )
    chunk = b"x" * 100_000
    tracemalloc.start()
    for _ in range(1_000):
        assert list(validator.feed(chunk)) == []
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3_000_000
    (rejected,) = validator.end()
    assert isinstance(rejected, Rejected)
    assert rejected.code == "record_too_large"


def test_messages_do_not_repeat_what_was_sent_at_length() -> None:
    long = "x" * 100_000
    for line in (
        rec(**body(model=long)),
        rec(body={"openrelay": {long: 1}}),
        b'{"%s":1,"%s":1}' % ((long.encode(),) * 2),
    ):
        rejected = only(line)
        assert len(rejected.message) < 300
        assert len(rejected.param or "") < 150
