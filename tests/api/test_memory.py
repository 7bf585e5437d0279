"""A file of the largest size passes through the API without ever being in its memory."""

from __future__ import annotations

import psutil

from tests.api.host import Host, create, jsonl, record, stored
from tests.support.memory import peak_mib

RECORDS = 50_000
GROWTH_MIB = 100


def peaks_mib(pid: int) -> int:
    """Peak resident memory of a process and of the workers it has now."""
    process = psutil.Process(pid)
    return sum(peak_mib(each.pid) for each in (process, *process.children(recursive=True)))


def test_the_largest_file_is_never_held_in_memory(host: Host) -> None:
    content = jsonl([record(f"r{i}", pad="x" * 3_800) for i in range(RECORDS)])
    assert 190_000_000 < len(content) <= 200_000_000
    assert host.child is not None
    with host.client() as client:
        create(client, input_file_id=stored(client))
        before = peaks_mib(host.child.pid)
        batch = create(client, input_file_id=stored(client, content))
        assert batch["errors"] is None
        assert peaks_mib(host.child.pid) - before < GROWTH_MIB
