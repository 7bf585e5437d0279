"""The validator against a slow reader that knows nothing of chunks, speed or memory.

The reference takes the file whole, splits it, parses every line with the pure Python decoder and walks the
result. Files are made of valid records, records with one thing wrong, and mutated bytes.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import unicodedata
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from schemas.records import Rejected
from schemas.settings import Egress, Limits
from streams.core.bodies import split_body
from streams.core.validate import Validator

CHAT = "/v1/chat/completions"
MODELS = {"m", "n"}
MAX_BYTES = 1_200


_ESCAPED = re.compile(r"(?:[^\\]|\\u[0-9a-fA-F]{4}|\\[^u])*+", re.DOTALL)
"""What the decoder lets pass after a backslash and u is anything `int` reads, spaces and signs too."""


class Bad(Exception):
    pass


def strict(data: bytes) -> Any:
    """JSON by the pure Python decoder, with every extra rule checked on a tree of pairs."""

    def no(_: str) -> Any:
        raise Bad

    decoder = json.JSONDecoder(object_pairs_hook=tuple, parse_constant=no)
    decoder.parse_string = json.decoder.py_scanstring  # type: ignore[attr-defined]
    decoder.scan_once = json.scanner.py_make_scanner(decoder)  # type: ignore[attr-defined]
    try:
        text = data.decode()
        value = decoder.decode(text)
    except (ValueError, RecursionError) as error:
        raise Bad from error
    if _ESCAPED.fullmatch(text) is None:
        raise Bad
    return plain(value, 1)


def plain(value: Any, level: int) -> Any:
    if isinstance(value, str):
        if any(unicodedata.category(each) == "Cs" for each in value):
            raise Bad
        return value
    if isinstance(value, float) and math.isinf(value):
        raise Bad
    if isinstance(value, list | tuple):
        if level > 100:
            raise Bad
        if isinstance(value, list):
            return [plain(each, level + 1) for each in value]
        keys = [plain(key, level) for key, _ in value]
        if len(set(keys)) < len(keys):
            raise Bad
        return {key: plain(each, level + 1) for key, (_, each) in zip(keys, value, strict=True)}
    return value


def reference(data: bytes) -> list[tuple[int, int, str | None, str | None]]:
    """(index, line, code or None, custom_id or None) of every record."""
    out: list[tuple[int, int, str | None, str | None]] = []
    used: list[str] = []
    batch_model = None
    if data.startswith(b"\xef\xbb\xbf"):
        data = data[3:]
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.replace(b" ", b"").replace(b"\t", b"").replace(b"\r", b""):
            continue
        code, custom_id, model = judge(line[:-1] if line.endswith(b"\r") else line, used, batch_model)
        if code is None:
            assert custom_id is not None
            used.append(custom_id)
            batch_model = model
        out.append((len(out), number, code, custom_id))
    return out


def judge(line: bytes, used: list[str], batch_model: str | None) -> tuple[str | None, str | None, str | None]:
    if len(line) > MAX_BYTES:
        return "record_too_large", None, None
    try:
        record = strict(line)
    except Bad:
        return "invalid_json", None, None
    if not isinstance(record, dict):
        return "invalid_record", None, None
    name = record.get("custom_id")
    if not isinstance(name, str) or not 1 <= len(name) <= 512:
        return "invalid_custom_id", None, None
    if any(unicodedata.category(each) == "Cc" for each in name):
        return "invalid_custom_id", None, None
    if name in used:
        return "duplicate_custom_id", name, None
    if record.get("method") != "POST":
        return "invalid_method", name, None
    if record.get("url") != CHAT:
        return "url_mismatch", name, None
    body = record.get("body")
    if not isinstance(body, dict):
        return "invalid_body", name, None
    if "tool_config" in body:
        return "tool_config_moved", name, None
    model = body.get("model")
    if model is None or not isinstance(model, str) or model == "":
        return "missing_model", name, None
    if batch_model is None and model not in MODELS:
        return "model_not_found", name, None
    if batch_model is not None and model != batch_model:
        return "model_mismatch", name, None
    if body.get("stream") is True:
        return "stream_not_supported", name, None
    return None, name, model


def measured(data: bytes, cuts: list[int]) -> list[tuple[int, int, str | None, str | None]]:
    validator = Validator(
        endpoint=CHAT,
        models=MODELS,
        workflows_enabled=False,
        egress=Egress(),
        limits=Limits(max_record_bytes=MAX_BYTES),
    )
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    results = [result for a, b in itertools.pairwise(edges) for result in validator.feed(data[a:b])]
    results += validator.end()
    assert validator.total == len(results)
    assert validator.rejected == sum(isinstance(each, Rejected) for each in results)
    for each in results:
        if not isinstance(each, Rejected):
            line = data[each.offset : each.offset + each.length]
            custom_id, body, openrelay = split_body(line)
            assert (custom_id, openrelay) == (each.custom_id, None)
            assert body in line
            assert json.loads(body) == json.loads(line)["body"]
    return [
        (each.index, each.line, each.code, each.custom_id)
        if isinstance(each, Rejected)
        else (each.index, each.number, None, each.custom_id)
        for each in results
    ]


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from([10**400, "\ud800", "[{", '"', "\\"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)
bodies = st.fixed_dictionaries(
    {"model": st.sampled_from(["m", "n", "m", "?", "", None, 1])},
    optional={
        "stream": st.sampled_from([True, False, None, 1]),
        "tool_config": st.none(),
        "messages": values,
    },
)
records = st.fixed_dictionaries(
    {
        "custom_id": st.sampled_from(["a", "b", "c", "d", "e\u0301", "é", "", None, 1, "x" * 513, "\x85"]),
        "method": st.sampled_from(["POST"] * 5 + ["GET", None]),
        "url": st.sampled_from([CHAT] * 5 + ["/", None]),
        "body": bodies | values,
    },
    optional={"extra": values},
)
encoded = st.builds(
    lambda value, ascii_only, indent: json.dumps(
        value, ensure_ascii=ascii_only, separators=(",", ": ") if indent else (",", ":")
    ).encode("utf-8", "surrogatepass"),
    records | values,
    st.booleans(),
    st.booleans(),
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    line = draw(encoded)
    position = draw(st.integers(0, len(line)))
    replaced = draw(st.integers(0, 3))
    inserted = draw(
        st.binary(max_size=3)
        | st.sampled_from([b"NaN", b'"a":1,"a":1', b"\\ud800", b"1e999", b"\r", b"\x00", b"[" * 101, b"}"])
    )
    return line[:position] + inserted + line[position + replaced :]


def nested(levels: int, opening: str, padding: int) -> bytes:
    """A valid record but for its depth, which is `levels` in all; brackets in a string do not count."""
    closing = {"[": "]", '{"k":': "}"}[opening]
    deep = opening * (levels - 1) + "1" + closing * (levels - 1)
    return record_with(f'"x":{deep},"pad":"{"[" * padding}"')


def doubled(key: str, where: str) -> bytes:
    """A valid record but for one key that appears twice when `where` repeats it."""
    return record_with({"same": f'"{key}":1,"{key}":2', "deep": f'"x":[{{"{key}":1,"{key}":1}}]'}[where])


def record_with(member: str) -> bytes:
    return f'{{"custom_id":"z","method":"POST","url":"{CHAT}",{member},"body":{{"model":"m"}}}}'.encode()


lines = st.one_of(
    encoded,
    encoded,
    mutated(),
    st.builds(nested, st.integers(97, 104), st.sampled_from(["[", '{"k":']), st.integers(0, 3)),
    st.builds(doubled, st.sampled_from(["x", "custom_id", "\\u0062ody"]), st.sampled_from(["same", "deep"])),
    st.sampled_from([b"", b" ", b"\t\r", b"\xef\xbb\xbf"]),
    st.binary(max_size=20),
)
files = st.builds(
    lambda bom, parts, ends, last: bom + b"".join(p + e for p, e in zip(parts, ends, strict=False)) + last,
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
    st.lists(lines, max_size=8),
    st.lists(st.sampled_from([b"\n", b"\n", b"\r\n", b"\n\n"]), min_size=8, max_size=8),
    lines,
)


@settings(max_examples=600, deadline=None)
@given(files, st.lists(st.integers(0, 10_000), max_size=6))
@example(b'{"custom_id":"a"', [1])
@example(b"\xef\xbb\xbf", [1, 2])
@example(b"\xef", [])
@example(b'["\\u\t000"]', [])
@example(b'["\\u+0a1 \\\\u0"]', [])
def test_same_verdicts_as_the_reference(data: bytes, cuts: list[int]) -> None:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        data = b" " + data
    assert measured(data, cuts) == reference(data)
