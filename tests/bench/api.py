"""The inference host by itself: checking, uploads, inline creates, and a read model with 100,000 batches."""

from __future__ import annotations

import os
import threading
import time

import httpx
import msgspec

from schemas import ids, topics
from schemas.facts import BatchFact, batch_key
from schemas.ids import BatchId, OrganizationId
from schemas.settings import Egress, Kafka, Limits
from streams.core.validate import Validator
from streams.kafka.producer import Producer
from tests.bench.harness import MODEL, Rig, lines, median_of, rig, timed
from tests.support import facts
from tests.support.until import until

Row = tuple[str, str, str]

ENDPOINT = "/v1/chat/completions"
BATCHES = 100_000
_encode = msgspec.json.Encoder().encode


def checking(rounds: int) -> list[Row]:
    """The strict check of 50,000 records, in this process, on one core."""
    data = lines(50_000, size=3_990)

    def check() -> None:
        validator = Validator(
            endpoint=ENDPOINT, models={MODEL}, workflows_enabled=False, egress=Egress(), limits=Limits()
        )
        for start in range(0, len(data), 1 << 20):
            for _ in validator.feed(data[start : start + (1 << 20)]):
                pass
        for _ in validator.end():
            pass
        assert (validator.total, validator.rejected) == (50_000, 0)

    seconds, every = median_of(rounds, lambda: timed(check))
    megabytes = len(data) / 1e6
    return [
        (
            f"check of 50,000 records, {megabytes:.0f} MB",
            f"{seconds:.2f} s, {megabytes / seconds:.0f} MB/s",
            _s(every),
        )
    ]


def requests(rounds: int) -> list[Row]:
    """Uploads of one and of five clients, and inline creates."""
    rows: list[Row] = []
    data = lines(10_000, size=3_990)
    megabytes = len(data) / 1e6
    with rig(slots=1, latency_ms=60_000) as on:
        client = on.clients["org_a"]

        def upload() -> None:
            files = {"file": ("x.jsonl", data)}
            client.post("/files", files=files, data={"purpose": "batch"}).raise_for_status()

        def five() -> None:
            threads = [threading.Thread(target=upload) for _ in range(5)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        for count, action in ((1, upload), (5, five)):
            seconds, every = median_of(rounds, lambda: timed(action))  # noqa: B023
            rows.append((f"upload, {count} at once", f"{count * megabytes / seconds:.0f} MB/s", _s(every)))
        for count in (1, 1_000, 50_000):
            records = [msgspec.Raw(line) for line in lines(count).splitlines()]
            body = msgspec.json.encode(
                {"endpoint": ENDPOINT, "completion_window": "24h", "requests": records}
            )

            def create() -> None:
                headers = {"Content-Type": "application/json", "Idempotency-Key": os.urandom(8).hex()}
                client.post("/batches", content=body, headers=headers).raise_for_status()  # noqa: B023

            create()
            seconds, every = median_of(rounds, lambda: timed(create))
            rows.append((f"create of {count:,} inline records", f"{seconds * 1000:.0f} ms", _s(every)))
    return rows


def large_read_model(rounds: int) -> list[Row]:
    """100,000 ended batches: a page of the list, and how long an API takes to read them all again."""
    with rig(slots=1) as on:
        _append_batches(on)
        client = on.clients["org_a"]
        until(lambda: _answers(client), 300, "the API has not read the batches")
        page, every = median_of(max(rounds, 20), lambda: timed(lambda: client.get("/batches?limit=20")))
        rows: list[Row] = [
            (f"a page of {BATCHES:,} batches", f"{page * 1000:.1f} ms", f"slowest {max(every) * 1000:.0f} ms")
        ]
        rebuilt = []
        for _ in range(rounds):
            for path in (on.stack.directory / "data" / "api").glob("readmodel-*.sqlite*"):
                path.unlink()
            began = time.perf_counter()
            on.stack.kill("api")
            until(lambda: _answers(client), 120, "the API is not back")
            rebuilt.append(time.perf_counter() - began)
        rows.append(
            (
                "kill of the API to its read model rebuilt",
                f"{sorted(rebuilt)[rounds // 2]:.1f} s",
                _s(rebuilt),
            )
        )
    return rows


def _append_batches(on: Rig) -> None:
    kafka = Kafka(bootstrap=on.stack.connection["kafka_bootstrap"])
    producer = Producer(kafka, "bench")
    for _ in range(BATCHES):
        batch = BatchId(ids.batch_id(os.urandom(16)))
        created = facts.created(batch, organization=OrganizationId("org_a"))
        ended: BatchFact = facts.ended(batch, "org_a")
        for fact in (ended, created):  # in this order no stage sees work in it
            partition = topics.partition_of(batch, kafka.partitions)
            producer.send(topics.BATCHES, _encode(fact), key=batch_key(fact, "bench"), partition=partition)
    producer.close(120)


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/batches?limit=1").status_code == 200
    except httpx.TransportError:
        return False


def _s(figures: list[float]) -> str:
    return ", ".join(f"{figure:.2f}" for figure in figures) + " s"
