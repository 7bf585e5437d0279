"""A file of the largest size passes through the API without ever being in its memory."""

from __future__ import annotations

import contextlib

import psutil

from tests.api.host import Host, create, jsonl, order, record, stored
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


def test_answers_nobody_reads_are_not_held_in_memory(host: Host) -> None:
    """Every record is rejected, and the answer to create lists them all; replays of it are left unread."""
    name = "\N{GRINNING FACE}" * 512
    content = jsonl(record(name) for _ in range(10_000))
    key = {"Idempotency-Key": "unread"}
    with host.client() as client:
        file = stored(client, content)
        answer = client.post("/v1/batches", json=order(input_file_id=file), headers=key)
        assert answer.status_code == 200
        errors = answer.json()["errors"]["data"]
        assert [each["line"] for each in errors] == list(range(2, 10_001))
        batch = answer.json()["id"]
        assert client.get(f"/v1/batches/{batch}").json()["errors"]["data"] == errors[:100]
        [listed] = [each for each in client.get("/v1/batches").json()["data"] if each["id"] == batch]
        assert listed["errors"]["data"] == errors[:100]
    assert host.child is not None
    before = peaks_mib(host.child.pid)
    with contextlib.ExitStack() as unread:
        clients = [unread.enter_context(host.client()) for _ in range(20)]
        for each in clients:
            reply = unread.enter_context(
                each.stream("POST", "/v1/batches", json=order(input_file_id=file), headers=key)
            )
            assert reply.status_code == 200
        assert len(answer.content) > 20_000_000
        assert peaks_mib(host.child.pid) - before < GROWTH_MIB
