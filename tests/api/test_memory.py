"""A file of the largest size passes through the API without ever being in its memory."""

from __future__ import annotations

from pathlib import Path

import psutil

from tests.api.host import Host, create, jsonl, record, stored

RECORDS = 50_000
GROWTH_MIB = 100


def peak_mib(pid: int) -> float:
    """Peak resident memory of a process and of the workers it has now."""
    total = 0
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        status = Path(f"/proc/{process.pid}/status").read_text("utf-8")
        total += next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    return total / 1024


def test_the_largest_file_is_never_held_in_memory(host: Host) -> None:
    content = jsonl([record(f"r{i}", pad="x" * 3_800) for i in range(RECORDS)])
    assert 190_000_000 < len(content) <= 200_000_000
    assert host.child is not None
    with host.client() as client:
        create(client, input_file_id=stored(client))
        before = peak_mib(host.child.pid)
        batch = create(client, input_file_id=stored(client, content))
        assert batch["errors"] is None
        assert peak_mib(host.child.pid) - before < GROWTH_MIB
