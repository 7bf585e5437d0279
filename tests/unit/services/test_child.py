"""When a role that ended is started again."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services import process
from services.embedded import broker
from services.embedded import child as children
from services.embedded.child import MAX_DELAY_S, Child, StartFailed, restart_delay_s
from services.embedded.plan import Role


@pytest.mark.parametrize(("quick", "killed"), [(0, False), (0, True), (1, False), (1, True), (5, True)])
def test_the_first_deaths_are_answered_at_once(quick: int, killed: bool) -> None:
    assert restart_delay_s(quick, killed) == 0


def test_a_process_that_keeps_ending_by_itself_waits_longer_each_time() -> None:
    delays = [restart_delay_s(quick, killed=False) for quick in range(2, 9)]
    assert delays == sorted(delays)
    assert delays[0] == 0.5
    assert delays[-1] == MAX_DELAY_S


def test_even_kills_from_outside_are_not_answered_at_once_for_ever() -> None:
    assert restart_delay_s(6, killed=True) == 0.5


def role(directory: Path, program: str) -> Child:
    (directory / "run").mkdir()
    return Child(Role("thing", "thing", (sys.executable, "-c", program)), directory, os.environ, lambda: None)


def test_a_log_that_could_not_be_written_is_spoken_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "thing.log"
    log.touch()
    assert children.end_of(log) == ""
    monkeypatch.setattr(children, "LEAST_FREE_BYTES", 1 << 80)
    assert "the disk of" in children.end_of(log)
    assert broker.explain(children.end_of(log)).endswith("the disk is full; free some space and start again")
    log.write_text("one\ntwo\n")
    assert children.end_of(log, 1) == "two"


async def test_a_start_that_takes_long_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(children, "SLOW_S", 0.1)
    slow = role(tmp_path, "import time; print('waiting for the sun', flush=True); time.sleep(600)")
    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, slow.reap)
    running = asyncio.create_task(slow.run())
    said = ""
    async with asyncio.timeout(30):
        while said.count("thing | waiting for the sun") < 2:
            await asyncio.sleep(0.01)
            said += capsys.readouterr().err
    assert "thing is not ready after 0.1 s" in said
    await slow.stop(time.monotonic() + 10)
    await running


async def test_a_role_that_ends_at_its_start_is_the_end(tmp_path: Path) -> None:
    broken = role(tmp_path, "raise SystemExit('no sun today')")
    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, broken.reap)
    with pytest.raises(StartFailed, match="no sun today"):
        async with asyncio.timeout(30):
            await broken.run()


READY = "import os, time; os.write(int(os.environ['OPENRELAY_READY_FD']), b'ready'); time.sleep(600)"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with process.listen("127.0.0.1", 0) as listening:
        yield listening


@pytest.mark.parametrize("good", [True, False])
async def test_a_role_is_replaced_by_one_that_serves(
    tmp_path: Path, listener: socket.socket, capsys: pytest.CaptureFixture[str], good: bool
) -> None:
    (tmp_path / "run").mkdir()
    program = tmp_path / "program.py"
    program.write_text(READY)
    pids: list[int] = []
    thing = Child(
        Role("thing", "thing", (sys.executable, str(program))),
        tmp_path,
        os.environ,
        lambda: pids.append(thing.pid),
        listener,
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, thing.reap)
    running = asyncio.create_task(thing.run())
    async with asyncio.timeout(60):
        await thing.ready.wait()
        if not good:
            program.write_text("raise SystemExit('no sun today')")
        await thing.renew(10)
        assert len(pids) == (2 if good else 1)
        assert thing.pid == pids[-1]
        assert psutil.pid_exists(thing.pid)
        assert not good or not psutil.pid_exists(pids[0])
        assert good or "no sun today" in capsys.readouterr().err
        await thing.stop(time.monotonic() + 10)
        await running
