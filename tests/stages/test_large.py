"""Records of many megabytes among small ones: everything arrives whole, in a bounded part of the memory."""

from __future__ import annotations

from tests.stages.conftest import MakePipeline
from tests.support.check import check_batch
from tests.support.pipeline import record
from tests.support.simulator import Simulator

LARGE = 12
BYTES = 15_000_000
SMALL = 500
MOST_MIB = 160
"""`dispatch.memory` allows for 96 MiB and one record more; all that is sent here comes to 340 MiB."""


def test_large_bodies_and_answers_take_a_bounded_part_of_the_memory(
    pipeline: MakePipeline, simulator: Simulator
) -> None:
    """The bodies are sent a second time, since the first answer to them is a 500."""
    stages = pipeline()
    stages.start("intake", "settle", "sink", "dispatch")
    stages.wait_ended(stages.create([record("first", "ok first")]))
    before = stages.peak_mib("dispatch")
    answers = stages.create(record(f"a{i}", f"big:{BYTES} large {i}") for i in range(LARGE))
    bodies = stages.create(
        (record(f"b{i}", f"status:500:1 large {i} " + "x" * BYTES) for i in range(LARGE)),
        organization="org_bodies",
    )
    small = stages.create((record(f"s{i}", "ok small") for i in range(SMALL)), organization="org_small")
    for batch, ids in (
        (small, [f"s{i}" for i in range(SMALL)]),
        (answers, [f"a{i}" for i in range(LARGE)]),
        (bodies, [f"b{i}" for i in range(LARGE)]),
    ):
        state = stages.wait_ended(batch)
        lines = stages.lines(batch, "output")
        check_batch(state, ids, lines, [])
        if batch == answers:
            texts = [line["response"]["body"]["choices"][0]["message"]["content"] for line in lines]
            assert {len(text) for text in texts} == {BYTES}
    grown = stages.peak_mib("dispatch") - before
    print(f"{grown} MiB more than before")
    assert grown < MOST_MIB
