"""`make demo` shows what it promises, and leaves nothing running."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil

from tests.support.command import environment


def test_the_demonstration_agrees_with_itself(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "services.cli.demo"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    output = tmp_path / "demo-output"
    assert "All three agree." in done.stdout
    assert str(output) in done.stdout
    assert done.stderr.count("rejected: ") >= 5
    files = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in output.glob("batch_*-output.jsonl")
    ]
    tools, results = sorted(files, key=len)
    assert len(results) >= 200
    assert [line["custom_id"] for line in tools] == ["tools-over-http", "tools-over-mcp", "map-and-reduce"]
    for line, said in zip(
        tools, ("decimal has", "match is no keyword", "Summarize 3 summaries"), strict=True
    ):
        assert said in json.dumps(line["response"]["body"])
        assert line["custom_id"] in done.stdout
    running = [
        process.cmdline()
        for process in psutil.process_iter()
        if any(str(output) in word for word in _words(process))
    ]
    assert running == []


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []
