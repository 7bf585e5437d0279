"""What the sweeper removes, and what it must not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from schemas import topics
from schemas.facts import (
    BatchFact,
    Created,
    Ended,
    FileDeleted,
    FileFact,
    FilePut,
    FileStored,
    ResultFile,
    Settled,
    Withdrawn,
)
from schemas.facts import Cause as Why
from schemas.ids import BatchId, FileId, OrganizationId, output_file_id
from schemas.money import UsageTotals
from services.api.readmodel import BATCHES_KEPT_MS
from services.api.sweeper import ATTEMPT_KEPT_MS, GRACE_MS, INPUT_KEPT_MS, Sweeper
from services.api.tables import Tables, connect
from streams.blobs.local import LocalBlobs
from streams.kafka.messages import KafkaFailed, Message
from tests.support import facts
from tests.support.pipeline import until

NOW_MS = 1_800_000_000_000
HOUR_MS = 3_600_000
ACME = OrganizationId("acme")


class World:
    """Tables fed by hand, and a store."""

    def __init__(self, directory: Path) -> None:
        self.blobs = LocalBlobs(str(directory / "blobs"))
        self.tables = Tables(directory / "x.sqlite", "cluster")
        self.reader = connect(directory / "x.sqlite")
        self.sweeper = Sweeper(self.blobs, directory / "x.sqlite", lambda: None)
        self._offset = 0

    def batch(self, fact: BatchFact, at_ms: int) -> None:
        self._apply(topics.BATCHES, msgspec.json.encode(fact), at_ms)

    def file(self, fact: FileFact, at_ms: int) -> None:
        self._apply(topics.FILES, msgspec.json.encode(fact), at_ms)

    def _apply(self, topic: str, value: bytes, at_ms: int) -> None:
        self.tables.apply([Message(topic, 0, self._offset, at_ms, "k", value)])
        self._offset += 1

    def put(self, *names: str) -> None:
        for name in names:
            self.blobs.put(name, b"x")

    def sweep(self, now_ms: int = NOW_MS) -> list[str]:
        self.sweeper.sweep(self.reader, now_ms)
        self.sweeper.look_around(self.reader, now_ms)
        return self.blobs.list("")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.reader.close()
    world.tables.close()


def attempt(batch: str, kind: str, at_ms: int) -> str:
    return f"batches/{batch}/{kind}-{at_ms:012x}{'0' * 16}.jsonl"


def file_id(number: int) -> FileId:
    return FileId(f"file-{number:032x}")


def created(batch: BatchId, at_ms: int) -> Created:
    return facts.created(
        batch,
        organization=ACME,
        input_file_id=file_id(0),
        input_object=attempt(batch, "input", at_ms),
        rejected_object=attempt(batch, "rejected", at_ms),
        total=2,
    )


def ended(fact: Created, output: str) -> Ended:
    file = ResultFile(output_file_id(fact.batch), output, 1, 1, "")
    settled = Settled(batch=fact.batch, completed=1, failed=1, usage=UsageTotals(), cause=Why.DONE)
    return Ended(
        batch=fact.batch,
        status="completed",
        output=file,
        error=None,
        created=fact,
        created_at_ms=0,
        settled=settled,
    )


def test_deleted_and_expired_files(world: World) -> None:
    for number, ttl_s in ((1, 10_000), (2, 10_000), (3, 10)):
        name = f"uploads/{file_id(number)}"
        world.put(name)
        world.file(
            FileStored(file=file_id(number), organization=ACME, object=name, bytes=1, ttl_s=ttl_s),
            NOW_MS - 60_000,
        )
    world.file(FileDeleted(file=file_id(2), organization=ACME), NOW_MS)
    assert world.sweep() == [f"uploads/{file_id(1)}"]
    world.put(f"uploads/{file_id(2)}")
    assert world.sweep() == [f"uploads/{file_id(1)}", f"uploads/{file_id(2)}"]
    assert world.sweep(NOW_MS + 10**10) == [f"uploads/{file_id(2)}"]


def test_inputs_of_ended_batches(world: World) -> None:
    batch = BatchId("batch_" + "a" * 32)
    start = NOW_MS - 48 * HOUR_MS
    fact = created(batch, start)
    output = f"batches/{batch}/output.jsonl"
    world.put(fact.input_object, fact.rejected_object or "", output)
    world.batch(fact, start)
    whole = world.blobs.list("")
    assert world.sweep() == whole
    world.batch(ended(fact, output), NOW_MS)
    assert world.sweep() == whole
    assert world.sweep(NOW_MS + INPUT_KEPT_MS) == [output, fact.rejected_object]
    assert world.sweep(NOW_MS + 31 * 24 * HOUR_MS) == [fact.rejected_object]
    assert world.sweep(start + BATCHES_KEPT_MS + 1) == []


def test_deleted_result_files(world: World) -> None:
    batch = BatchId("batch_" + "a" * 32)
    fact = created(batch, NOW_MS)
    output = f"batches/{batch}/output.jsonl"
    world.put(output)
    world.batch(fact, NOW_MS)
    world.batch(ended(fact, output), NOW_MS)
    assert world.sweep() == [output]
    world.file(FileDeleted(file=output_file_id(batch), organization=ACME), NOW_MS)
    assert world.sweep() == []


def test_attempts_that_came_to_nothing(world: World) -> None:
    old, young = NOW_MS - ATTEMPT_KEPT_MS - 1, NOW_MS - ATTEMPT_KEPT_MS + 1
    never, won, withdrawn = (BatchId("batch_" + each * 32) for each in "abc")
    mine = created(won, old)
    world.batch(mine, NOW_MS)
    world.batch(created(withdrawn, old), NOW_MS)
    world.batch(Withdrawn(batch=withdrawn), NOW_MS)
    kept = [
        attempt(never, "input", young),
        attempt(never, "rejected", young),
        mine.input_object,
        mine.rejected_object or "",
        f"batches/{won}/output.jsonl",
        f"batches/{never}/segment-1",
    ]
    gone = [
        attempt(never, "input", old),
        attempt(never, "rejected", old),
        attempt(won, "input", old - 1),
        attempt(withdrawn, "input", old),
        attempt(withdrawn, "rejected", old),
    ]
    world.put(*kept, *gone)
    assert world.sweep() == sorted(kept)


def test_uploads_that_never_became_files(world: World) -> None:
    past, late, future = NOW_MS // 1000 - GRACE_MS // 1000 - 1, NOW_MS // 1000 - 1, NOW_MS // 1000 + 1
    owner = "0" * 16
    world.put(
        f"pending/{file_id(1)}.{past}",
        f"uploads/{file_id(1)}",
        f"pending/{file_id(2)}.{past}",
        f"uploads/{file_id(2)}",
        f"pending/{file_id(3)}.{late}",
        f"uploads/{file_id(3)}",
        f"tickets/{file_id(4)}.{owner}.{past}",
        f"tickets/{file_id(5)}.{owner}.{future}",
    )
    world.file(
        FileStored(file=file_id(2), organization=ACME, object=f"uploads/{file_id(2)}", bytes=1), NOW_MS
    )
    assert world.sweep() == [
        f"pending/{file_id(3)}.{late}",
        f"tickets/{file_id(5)}.{owner}.{future}",
        f"uploads/{file_id(2)}",
        f"uploads/{file_id(3)}",
    ]


def test_what_was_put_and_never_completed(world: World) -> None:
    past, late = NOW_MS // 1000 - GRACE_MS // 1000 - 1, NOW_MS // 1000 - 1
    first, second, third = f"puts/{file_id(1)}.0a.{past}", f"puts/{file_id(1)}.0b.{past}", file_id(2)
    world.put(first, second, f"puts/{third}.0c.{past}", f"puts/{file_id(3)}.0d.{late}")
    for name in (first, second):
        world.file(FilePut(file=file_id(1), organization=ACME, object=name, bytes=1), NOW_MS)
    world.file(FileStored(file=file_id(1), organization=ACME, object=first, bytes=1), NOW_MS)
    assert world.sweep() == [first, f"puts/{file_id(3)}.0d.{late}"]
    world.file(FileDeleted(file=file_id(1), organization=ACME), NOW_MS)
    assert world.sweep() == [f"puts/{file_id(3)}.0d.{late}"]


def test_what_arrived_at_a_bucket(world: World) -> None:
    past, late = NOW_MS // 1000 - GRACE_MS // 1000 - 1, NOW_MS // 1000 - 1
    owner = "0" * 16
    kept = f"arrivals/{file_id(2)}.{owner}.5.{late}"
    world.put(f"arrivals/{file_id(1)}.{owner}.5.{past}", f"puts/{file_id(1)}.0a.{past}", kept)
    world.file(
        FileStored(file=file_id(1), organization=ACME, object=f"puts/{file_id(1)}.0a.{past}", bytes=5), NOW_MS
    )
    assert world.sweep() == [kept, f"puts/{file_id(1)}.0a.{past}"]


def test_nothing_is_looked_for_while_the_tables_may_be_behind(world: World, tmp_path: Path) -> None:
    """What a fact not yet read names would look as if nobody named it."""

    def behind() -> None:
        raise KafkaFailed("the broker does not answer")

    world.put(f"puts/{file_id(1)}.0a.5")
    with pytest.raises(KafkaFailed):
        Sweeper(world.blobs, tmp_path / "x.sqlite", behind).look_around(world.reader, NOW_MS)
    assert world.blobs.list("") == [f"puts/{file_id(1)}.0a.5"]


def test_it_runs_and_stops(world: World, tmp_path: Path) -> None:
    sweeper = Sweeper(world.blobs, tmp_path / "x.sqlite", lambda: None, every_s=0.01)
    world.put(f"tickets/{file_id(4)}.{'0' * 16}.5")
    sweeper.start()
    until(lambda: world.blobs.list("") == [], 60, "a sweep")
    sweeper.stop()
