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
    results = [
        json.loads(line) for line in next(output.glob("batch_*-output.jsonl")).read_text().splitlines()
    ]
    assert len(results) >= 200
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
