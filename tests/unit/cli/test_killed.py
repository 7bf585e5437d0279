"""`orl` as a process: killed and started again, interrupted, and on a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.cli.standin import StandIn

CHAT = "/v1/chat/completions"
PROGRAM = [sys.executable, "-P", "-m", "services.cli.orl"]


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"custom_id": "a"}\n{"custom_id": "b"}\n')
    return path


def command(path: Path) -> list[str]:
    return [*PROGRAM, "batches", "create", "--input-file", str(path), "--endpoint", CHAT, "--wait"]


def until(condition: Callable[[], bool], deadline_s: float = 15.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_killed_wait_started_again_goes_on_with_the_same_batch(
    logged_in: Path, server: StandIn, requests: Path
) -> None:
    server.hold.clear()
    with subprocess.Popen(command(requests), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as first:
        until(lambda: server.count("GET", "/batches/batch_0") >= 2)
        first.kill()
        first.communicate()
    server.hold.set()
    second = subprocess.run(command(requests), capture_output=True, text=True, timeout=30)
    assert second.returncode == 0, second.stderr
    assert json.loads(second.stdout)["id"] == "batch_0"
    assert "going on with batch_0" in second.stderr
    assert server.created == ["batch_0"]
    assert server.count("POST", "/files") == 1


def test_killed_in_the_middle_of_the_create(logged_in: Path, server: StandIn, requests: Path) -> None:
    server.trouble.extend([("POST", "/batches", "lost")] * 100)
    with subprocess.Popen(command(requests), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as first:
        until(lambda: bool(server.created))
        first.kill()
        first.communicate()
    server.trouble.clear()
    second = subprocess.run(command(requests), capture_output=True, text=True, timeout=30)
    assert (second.returncode, server.created) == (0, ["batch_0"])


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Background jobs of a shell ignore SIGINT, and so do their children, unless there is a handler."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_says_how_to_go_on(logged_in: Path, server: StandIn, requests: Path) -> None:
    server.hold.clear()
    with subprocess.Popen(command(requests), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        until(lambda: server.count("GET", "/batches/batch_0") >= 1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=15)
    assert process.returncode == 130
    last = "batch_0 goes on without us; `orl batches wait batch_0` waits for it again"
    assert said.decode().splitlines()[-1] == last


def test_bars_and_tables_on_a_terminal(logged_in: Path, server: StandIn, requests: Path) -> None:
    status, shown = on_terminal(command(requests))
    assert status == 0
    assert "in_progress" in shown
    assert "2 completed, 0 failed, 2 in total" in shown
    status, shown = on_terminal([*PROGRAM, "batches", "list"])
    assert status == 0
    assert "COMPLETED" in shown


def test_a_batch_of_tools_is_asked_about_on_a_terminal(
    logged_in: Path, server: StandIn, tmp_path: Path
) -> None:
    path = tmp_path / "tools.jsonl"
    path.write_text(
        '{"custom_id": "a", "body": {"openrelay": {"tool_config": {"url": "https://x.example"}}}}\n'
    )
    status, shown = on_terminal(command(path), answer="n\n")
    assert status == 2
    assert "up to 9 model calls" in shown
    assert "Nothing was submitted." in shown
    assert server.created == []
    assert on_terminal(command(path), answer="y\n")[0] == 0


def on_terminal(words: list[str], answer: str = "") -> tuple[int, str]:
    """Run a command on a terminal of its own; its exit status and all that it showed."""
    child, terminal = pty.fork()
    if child == 0:
        os.execvp(words[0], words)
    shown = b""
    end = time.monotonic() + 30
    if answer:
        os.write(terminal, answer.encode())
    with contextlib.suppress(OSError):  # how a terminal says that its last program is gone
        while time.monotonic() < end:
            if select.select([terminal], [], [], 0.1)[0]:
                piece = os.read(terminal, 65536)
                if not piece:
                    break
                shown += piece
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), shown.decode()


def test_a_reader_that_leaves_is_no_error(logged_in: Path, server: StandIn) -> None:
    server.files["file-a"] = b"line\n" * 2_000_000
    script = '"$@" files content get file-a | head -n 1'
    words = ["bash", "-o", "pipefail", "-c", script, "bash", *PROGRAM]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0
    assert (done.stdout, done.stderr) == ("line\n", "")


def test_memory_stays_flat_however_large_the_file(logged_in: Path, server: StandIn, tmp_path: Path) -> None:
    path = tmp_path / "large.jsonl"
    with path.open("wb") as file:
        file.truncate(150_000_000)
    # VmHWM is this program's own peak; what getrusage says includes the process it was forked from.
    program = (
        "import pathlib, sys\n"
        "from services.cli.orl import main\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    lines = pathlib.Path('/proc/self/status').read_text().splitlines()\n"
        "    peak = next(line for line in lines if line.startswith('VmHWM:'))\n"
        "    print(peak.split()[1], file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "files", "upload", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert len(server.files["file-0"]) == 150_000_000
    assert int(done.stderr.splitlines()[-1]) < 130_000
