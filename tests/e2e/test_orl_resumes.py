"""`orl batches create --wait` outlives its own death, and the server's."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import environment
from tests.support.stack import Stack

CHAT = "/v1/chat/completions"
ORL = [sys.executable, "-P", "-m", "services.cli.orl"]
CREATE = [*ORL, "batches", "create", "--input-file", "requests.jsonl", "--endpoint", CHAT, "--wait"]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("resumes")) as running:
        yield running


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A directory with twenty records of three seconds each."""
    with (tmp_path / "requests.jsonl").open("w") as file:
        for number in range(20):
            messages = [{"role": "user", "content": f"slow:3 record {number}"}]
            body = {"model": "openrelay/gpt-oss-120b", "messages": messages}
            record = {"custom_id": f"{number}", "method": "POST", "url": CHAT, "body": body}
            file.write(json.dumps(record) + "\n")
    return tmp_path


def variables(stack: Stack, work: Path) -> dict[str, str]:
    home = {f"XDG_{name}_HOME": str(work / name.lower()) for name in ("CONFIG", "STATE", "DATA")}
    connection = stack.connection
    credentials = {
        "OPENRELAY_BASE_URL": connection["base_url"],
        "OPENRELAY_API_KEY": connection["api_key"],
    }
    return environment(**home, **credentials)


def batches(stack: Stack, work: Path) -> list[dict[str, Any]]:
    command = [*ORL, "batches", "list", "--json"]
    done = subprocess.run(command, env=variables(stack, work), capture_output=True, timeout=60, check=True)
    data: list[dict[str, Any]] = json.loads(done.stdout)["data"]
    return data


def start(stack: Stack, work: Path) -> subprocess.Popen[str]:
    """Start the command and return once it waits for its batch."""
    process = subprocess.Popen(
        CREATE,
        cwd=work,
        env=variables(stack, work),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    deadline = time.monotonic() + 60
    while "in_progress" not in process.stderr.readline():
        assert process.poll() is None
        assert time.monotonic() < deadline
    return process


def test_killed_while_it_waits_and_started_again(stack: Stack, work: Path) -> None:
    before = len(batches(stack, work))
    with start(stack, work) as first:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    done = subprocess.run(
        CREATE, cwd=work, env=variables(stack, work), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "going on with batch_" in done.stderr
    batch = json.loads(done.stdout)
    assert batch["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    known = batches(stack, work)
    assert len(known) == before + 1
    assert known[0]["id"] == batch["id"]


def test_the_api_dies_while_it_waits(stack: Stack, work: Path) -> None:
    with start(stack, work) as waiting:
        stack.kill("api")
        out, err = waiting.communicate(timeout=120)
    assert waiting.returncode == 0, err
    assert json.loads(out)["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
