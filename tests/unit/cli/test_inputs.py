"""What a look at the input file tells."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from services.cli import inputs
from services.cli.client import Exit, Trouble


def line(**openrelay: Any) -> bytes:
    body = {"model": "m", "messages": []} | ({"openrelay": openrelay} if openrelay else {})
    return json.dumps(
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    ).encode()


def test_records_and_the_calls_their_tools_may_take(tmp_path: Path) -> None:
    lines = [
        b"\xef\xbb\xbf" + line(tool_config={"url": "https://x", "max_rounds": 3}),
        b"",
        b" \t\r",
        line(tool_config={"url": "https://x"}),
        line(tool_config={"url": "https://x", "max_rounds": 2}),
        line(tool_config={"url": "https://x", "max_rounds": 99}),
        line(tool_config={"url": "https://x", "max_rounds": 0}),
        line(tool_config={"url": "https://x", "max_rounds": "many"}),
        line(workflow={"url": "https://x"}),
        line(workflow={"url": "https://x", "max_requests": 5_000}),
        line(workflow={"url": "https://x", "max_requests": -1}),
        line(tool_config={"url": "https://x", "max_rounds": 1}).replace(b"tool_config", b"tool\\u005fconfig"),
        line(tool_config={"url": "https://x"}).replace(b'"messages": []', b'"seed": 1E400'),
        b'{"tool_config": "tool_config"',
        line(),
    ]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    looked = inputs.inspect(path)
    assert looked.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert looked.bytes == path.stat().st_size
    assert (looked.records, looked.tool_records, looked.workflow_records) == (13, 7, 2)
    plain = 4  # two of them the server rejects
    assert looked.most_calls == plain + 4 + 9 + 3 + 17 + 9 + 64 + 1_024 + 2 + 9


def test_a_line_of_any_length_is_one_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_LINE_BYTES", 64)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'"tool_config"' * 20 + b"\n" + line() + b"\n" + b"x" * 64 + b"\n")
    looked = inputs.inspect(path)
    assert (looked.records, looked.tool_records) == (3, 0)
    assert looked.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_what_is_no_file(tmp_path: Path) -> None:
    for path, said in ((tmp_path, "not a regular file"), (tmp_path / "none", "does not exist")):
        with pytest.raises(Trouble, match=said) as trouble:
            inputs.inspect(path)
        assert trouble.value.exit_status is Exit.USAGE
