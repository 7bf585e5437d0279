"""`openrelay audit` proves a good batch good, and says of every kind of damage where it is."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from schemas import topics
from schemas.facts import Ended, FileDeleted, ResultFile
from schemas.ids import BatchId
from schemas.records import DoneSet
from services.operator.audit import Report, audit, prove
from services.operator.log import Log
from services.operator.telling import lines
from services.operator.waiting import waiting
from streams.core import bitmap
from streams.kafka.producer import Producer
from tests.stages.conftest import LIMITS, MakePipeline
from tests.support.broker import EmbeddedBroker
from tests.support.command import environment, openrelay
from tests.support.customer import Customer
from tests.support.pipeline import Pipeline, record
from tests.support.settings import settings_for
from tests.support.simulator import Simulator
from tests.support.until import until
from tests.support.warehouse import EmbeddedWarehouse

TOOLS = [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}]
ROLES = ("intake", "dispatch", "settle", "sink", "meter")
PROMPTS = [
    "ok audit",
    "status:400 audit",
    "usage:null audit",
    "usage:7/3/2 audit",
    "drop audit",
    *[f"usage:{i % 7}/{i % 11}/0 audit {i}" for i in range(60)],
]


class Finished(NamedTuple):
    stages: Pipeline
    batch: BatchId
    ended: Ended


def good(pipeline: Pipeline, batch: BatchId) -> Report:
    """The report once the meter has brought everything."""
    report: Report = until(
        lambda: found if (found := audit(pipeline.settings, batch)).good else None,
        60,
        lambda: "\n".join(lines(audit(pipeline.settings, batch))),
    )
    return report


def command(pipeline: Pipeline, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*openrelay(), *arguments, "--config", str(pipeline.config)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory,
    shared: Path,
    broker: EmbeddedBroker,
    tables: EmbeddedWarehouse,
    simulator: Simulator,
) -> Iterator[Finished]:
    """A good batch of records of every kind. Tests judge it, and put back what they damage."""
    settings = settings_for(
        shared,
        bootstrap=broker.bootstrap,
        warehouse_url=tables.url,
        pool_url=simulator.url,
        limits=LIMITS,
    )
    stages = Pipeline(tmp_path_factory.mktemp("audit"), settings)
    try:
        with Customer() as customer:
            stages.start(*ROLES)
            plain = [record(f"r{i}", prompt) for i, prompt in enumerate(PROMPTS)]
            batch = stages.create(_numbered([*plain, *_loops(customer, len(plain))]))
            ended = stages.wait_ended(batch).ended
        assert ended is not None
        good(stages, batch)
        assert stages.intake is not None
        stages.intake.stop()
        stages.intake = None
        for role in list(stages.children):
            stages.stop(role)
        yield Finished(stages, batch, ended)
    finally:
        stages.close()


def _numbered(records: list[dict[str, Any]]) -> Iterator[bytes]:
    """Each with a number in its body that no machine type holds."""
    for each in records:
        yield json.dumps(each).encode().replace(b'"model":', b'"seed": -1E400, "model":', 1)


def _loops(customer: Customer, first: int) -> list[dict[str, Any]]:
    """Records of several calls: a workflow that ends well, one that fails, one half unmetered, and tools."""

    def step(*prompts: str) -> dict[str, Any]:
        bodies = [{"messages": [{"role": "user", "content": prompt}]} for prompt in prompts]
        requests = [
            {"id": prompt.split()[-1], "body": body} for prompt, body in zip(prompts, bodies, strict=True)
        ]
        return {"status": "continue", "requests": requests}

    over: dict[str, Any] = {"status": "completed", "output": 10**500}
    failed = {"status": "failed", "error": {"message": "no"}}
    flows = [
        [step("usage:5/3/2 one", "usage:7/1 two", "status:400 three"), step("usage:1/1 four"), over],
        [step("usage:9/4 five"), failed],
        [step("usage:null six", "usage:2/2 seven"), over],
    ]
    records = []
    for place, answers in enumerate(flows):
        customer.callbacks[f"audit{place}"] = lambda asked, answers=answers: answers[asked["step"]]
        workflow = {"url": f"{customer.url}/flow/audit{place}"}
        records.append(record(f"r{first + place}", "x", openrelay={"workflow": workflow}))
    tools = {"tool_config": {"url": f"{customer.url}/tools"}}
    prompt = "tools:2:1 usage:10/5/4/1 audit"
    records.append(record(f"r{first + len(flows)}", prompt, tools=TOOLS, openrelay=tools))
    return records


def test_a_finished_batch_is_proven(finished: Finished) -> None:
    stages, batch, _ = finished
    report = audit(stages.settings, batch)
    assert (report.good, report.total, report.completed, report.failed) == (True, 69, 66, 3)
    assert not report.notes
    done = command(stages, "audit", batch)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "each record is in exactly one place" in done.stdout
    done = command(stages, "audit", batch, "--json")
    assert json.loads(done.stdout)["good"] is True
    done = command(stages, "audit", "batch_unknown")
    assert (done.returncode, done.stderr) == (1, "there is no batch batch_unknown\n")


def test_a_cancelled_batch_is_proven(pipeline: MakePipeline, simulator: Simulator) -> None:
    stages = pipeline()
    simulator.control(latency_ms=300)
    stages.start(*ROLES)
    before = simulator.calls()["count"]
    batch = stages.create(record(f"r{i}", f"ok audit-cancel {i}") for i in range(600))
    until(lambda: simulator.calls()["count"] > before, 30, "calls have not begun")
    stages.cancel(batch)
    stages.wait_ended(batch)
    assert good(stages, batch).status == "cancelled"


def swapped(text: list[bytes]) -> list[bytes]:
    return [text[1], text[0], *text[2:]]


def renamed(text: list[bytes]) -> list[bytes]:
    return [text[0].replace(b'"r0"', b'"r9"'), *text[1:]]


def dearer(text: list[bytes]) -> list[bytes]:
    line = json.loads(text[3])
    line["response"]["body"]["usage"]["prompt_tokens"] += 1_000
    return [*text[:3], json.dumps(line).encode(), *text[4:]]


def unreported(text: list[bytes]) -> list[bytes]:
    return [*text[:63], text[63].replace(b'"workflow_steps"', b'"steps"'), *text[64:]]


def cheaper(text: list[bytes]) -> list[bytes]:
    line = json.loads(text[63])
    line["response"]["body"]["openrelay"]["usage"]["cost_nano_usd"] -= 1
    return [*text[:63], json.dumps(line).encode(), *text[64:]]


DAMAGE: list[tuple[Callable[[list[bytes]], list[bytes]], list[str]]] = [
    (lambda text: text[1:], ["record 0: is in neither file", "number of lines is 65, must be 66"]),
    (lambda text: [*text, text[0]], ["record 0: is there again"]),
    (swapped, ["record 0: comes after record 2"]),
    (renamed, ["record 0: custom_id is r9, must be r0"]),
    (dearer, ["input tokens", "cost in nano-USD", "ClickHouse: record 5"]),
    (cheaper, ["cost in nano-USD", "ClickHouse: record 65"]),
    (unreported, ["record 65: its report of a workflow cannot be read"]),
    (lambda text: [*text[:-1], b'{"id": "x"'], ["cannot be read", "record 68: is in neither file"]),
    (lambda text: [text[0].replace(b"batch_req_", b"batch_req_0"), *text[1:]], ["which no record"]),
    (
        lambda text: [text[0].replace(b'"status_code":200', b'"status_code":500'), *text[1:]],
        ["does not belong"],
    ),
]


def test_damage_is_found_and_named(finished: Finished) -> None:
    """Files that were published as if they were right: hash, size and number of lines agree."""
    stages, _, ended = finished
    assert ended.output is not None
    text = stages.blobs.read(ended.output.object).splitlines()
    for damage, said in DAMAGE:
        found = _judge(stages, _published(stages, ended, damage(text)))
        for each in said:
            assert each in found, f"{each!r} is not in\n{found}"


def test_facts_that_contradict_each_other_are_found(finished: Finished) -> None:
    stages, _, ended = finished
    replace = msgspec.structs.replace
    wrong = replace(ended.settled, completed=ended.settled.completed + 1)
    found = _judge(stages, replace(ended, settled=wrong, error=None, status="failed"))
    for each in ("facts: settled", "status is failed", "completed + failed is 70", "error file: existence"):
        assert each in found, f"{each!r} is not in\n{found}"


def test_a_changed_byte_is_found(finished: Finished) -> None:
    stages, batch, ended = finished
    assert ended.error is not None
    data = stages.blobs.read(ended.error.object)
    try:
        stages.blobs.put(ended.error.object, data.replace(b'"r1"', b'"rX"', 1))
        report = audit(stages.settings, batch)
        assert any(fault.place == "error file" and "sha256" in fault.said for fault in report.faults)
        assert command(stages, "audit", batch).returncode == 1
    finally:
        stages.blobs.put(ended.error.object, data)


def test_a_lost_file_is_a_fault_and_a_deleted_or_expired_one_is_not(
    finished: Finished, tables: EmbeddedWarehouse
) -> None:
    stages, batch, ended = finished
    assert ended.output is not None
    data = stages.blobs.read(ended.output.object)
    stages.blobs.delete(ended.output.object)
    try:
        [fault] = audit(stages.settings, batch).faults
        assert fault.place == "output file"
        assert "was not deleted nor has it expired" in fault.said

        state = msgspec.structs.replace(stages.state(batch), ended_at_ms=1)
        with Log(stages.settings.kafka) as log:
            report = prove(stages.settings, stages.blobs, log, state, ended)
        assert report.good
        assert "the output file, which has expired" in "".join(report.unproven)

        fact = FileDeleted(file=ended.output.file_id, organization=ended.created.organization)
        producer = Producer(stages.settings.kafka, "test-audit")
        value = msgspec.json.encode(fact)
        producer.send(topics.FILES, value, key=f"{ended.output.file_id}:deleted", partition=0)
        producer.close()
        report = audit(stages.settings, batch)
        assert report.good
        assert "the output file, which was deleted" in "".join(report.unproven)
        done = command(stages, "audit", batch)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "agrees    facts, counts and usage" in done.stdout
        assert "cannot be compared any more" in done.stdout

        usage = msgspec.structs.replace(ended.settled.usage, cost_nano_usd=1)
        wrong = msgspec.structs.replace(ended, settled=msgspec.structs.replace(ended.settled, usage=usage))
        assert "ClickHouse: sum of [input, cached, output, cost]" in _judge(stages, wrong)
    finally:
        stages.blobs.put(ended.output.object, data)


def test_a_missing_and_a_doubled_row_are_found(finished: Finished, tables: EmbeddedWarehouse) -> None:
    stages, batch, _ = finished
    client = tables.client()
    columns = "* EXCEPT ingested_at"
    rows = f"FROM billing.usage_events FINAL WHERE batch_id = '{batch}' AND request_index = 3"
    client.command("CREATE TABLE billing.kept AS billing.usage_events")
    client.command(f"INSERT INTO billing.kept ({columns}) SELECT {columns} {rows}")
    try:
        client.command(
            f"INSERT INTO billing.usage_events ({columns})"
            f" SELECT {columns} REPLACE ('usage:9:x' AS entry_id) {rows}"
        )
        report = audit(stages.settings, batch)
        assert {(fault.place, fault.index) for fault in report.faults} == {("ClickHouse", 3)}
        client.command(f"DELETE FROM billing.usage_events WHERE batch_id = '{batch}' AND request_index = 3")
        report = audit(stages.settings, batch)
        assert ("ClickHouse", 3) in {(fault.place, fault.index) for fault in report.faults}
        assert any("is billed by its line and has no row" in fault.said for fault in report.faults)
    finally:
        client.command(f"INSERT INTO billing.usage_events ({columns}) SELECT {columns} FROM billing.kept")
        client.command("DROP TABLE billing.kept SYNC")
        client.close()
    assert audit(stages.settings, batch).good


def test_the_input_may_be_gone(finished: Finished) -> None:
    stages, batch, ended = finished
    data = stages.blobs.read(ended.created.input_object)
    stages.blobs.delete(ended.created.input_object)
    try:
        report = audit(stages.settings, batch)
        assert report.good
        assert any("custom_ids not compared" in note for note in report.notes)
    finally:
        stages.blobs.put(ended.created.input_object, data)


def test_a_running_batch_is_followed_through_the_stages(pipeline: MakePipeline, simulator: Simulator) -> None:
    stages = pipeline(msgspec.structs.replace(LIMITS, stuck_after_s=2.0))
    batch = stages.create(record(f"r{i}", f"ok follow {i}") for i in range(100))
    report = until(
        lambda: found if not (found := audit(stages.settings, batch)).good else None, 30, "not stuck"
    )
    assert report.whereabouts.laid_out is None
    assert report.whereabouts.stuck[0].count == 100

    stages.start("intake")
    report = until(lambda: _stuck(stages, batch, "not started"), 60, "no lane is stuck")
    assert report.whereabouts.laid_out == 100
    assert sum(stuck.count for stuck in report.whereabouts.stuck) == 100
    assert report.whereabouts.stuck[0].indices
    done = command(stages, "audit", batch)
    assert (done.returncode, "STUCK" in done.stdout) == (1, True)

    stages.start("dispatch")
    until(lambda: audit(stages.settings, batch).whereabouts.finished == 100, 60, "not finished")  # type: ignore[union-attr]
    report = audit(stages.settings, batch)
    assert report.good, "\n".join(lines(report))
    assert report.whereabouts.results_waiting == 100

    stages.start("settle")
    until(lambda: audit(stages.settings, batch).whereabouts.settled, 60, "not settled")  # type: ignore[union-attr]
    report = audit(stages.settings, batch)
    assert report.whereabouts.output_lines == 100
    until(lambda: _stuck(stages, batch, "files are not made"), 60, "the lack of files is not seen")

    stages.start("sink", "meter")
    stages.wait_ended(batch)
    good(stages, batch)


def test_a_lost_result_is_named(pipeline: MakePipeline, simulator: Simulator) -> None:
    """A dispatcher that calls a record finished whose result never came."""
    stages = pipeline(msgspec.structs.replace(LIMITS, stuck_after_s=2.0))
    stages.start("intake", "dispatch", "settle", "sink", "meter")
    simulator.control(latency_ms=60_000)
    try:
        batch = stages.create(record(f"r{i}", f"ok lost {i}") for i in range(40))
        until(lambda: audit(stages.settings, batch).whereabouts.lanes, 30, "not laid out")  # type: ignore[union-attr]
        until(
            lambda: any(lane.started_upto for lane in audit(stages.settings, batch).whereabouts.lanes),  # type: ignore[union-attr]
            30,
            "not started",
        )
        stages.kill("dispatch")
        _pretend_finished(stages, batch)
        report = audit(stages.settings, batch)
        [stuck] = [s for s in report.whereabouts.stuck if "has no result in the log" in s.said]  # type: ignore[union-attr]
        assert stuck.count == 1
        assert len(stuck.indices) == 1
    finally:
        simulator.control(latency_ms=0)
    stages.cancel(batch)


def test_lag_by_partition(pipeline: MakePipeline) -> None:
    stages = pipeline()
    stages.start("intake", "dispatch")
    batch = stages.create(record(f"r{i}", f"ok lag {i}") for i in range(50))
    home = topics.partition_of(batch, stages.settings.kafka.partitions)

    def row() -> Any:
        return next(
            each
            for each in waiting(stages.settings)
            if (each.group, each.topic, each.partition) == ("settle", "results", home)
        )

    found = until(lambda: each if (each := row()).lag >= 50 else None, 60, "no lag")
    assert found.end - found.lag == max(found.committed, 0)
    assert found.oldest_s is not None
    assert 0 <= found.oldest_s < 60
    done = command(stages, "lag", "--json")
    assert done.returncode == 0, done.stderr
    assert any(each["lag"] >= 50 for each in json.loads(done.stdout))
    assert "settle" in command(stages, "lag").stdout
    stages.start("settle", "sink", "meter")
    stages.wait_ended(batch)
    until(lambda: row().lag == 0, 30, "the lag stays")
    assert row().oldest_s is None


def _published(stages: Pipeline, ended: Ended, text: list[bytes]) -> Ended:
    """The fact as it would be, had the sink made this output file."""
    assert ended.output is not None
    data = b"".join(line + b"\n" for line in text)
    name = f"batches/{ended.batch}/damaged.jsonl"
    stages.blobs.put(name, data)
    digest = hashlib.sha256(data).hexdigest()
    output = ResultFile(ended.output.file_id, name, len(data), len(text), digest)
    return msgspec.structs.replace(ended, output=output)


def _judge(stages: Pipeline, ended: Ended) -> str:
    state = msgspec.structs.replace(stages.state(ended.batch), ended=ended)
    with Log(stages.settings.kafka) as log:
        report = prove(stages.settings, stages.blobs, log, state, ended)
    assert not report.good
    return "\n".join(lines(report))


def _pretend_finished(stages: Pipeline, batch: BatchId) -> None:
    """Set one more bit of one of the batch's done-sets."""
    partitions = stages.settings.kafka.partitions
    with Log(stages.settings.kafka) as log:
        messages = [m for p in range(partitions) for m in log.partition(topics.DONE, p)]
    message = next(m for m in reversed(messages) if m.value is not None and f":{batch}:" in str(m.key))
    done = msgspec.json.decode(message.value or b"", type=DoneSet)
    finished = bitmap.padded(done.finished, done.started_upto)
    bitmap.set_bit(finished, bitmap.first_unset(finished, done.started_upto))
    producer = Producer(stages.settings.kafka, "test-audit")
    value = msgspec.json.encode(msgspec.structs.replace(done, finished=bytes(finished)))
    producer.send(topics.DONE, value, key=message.key, partition=message.partition)
    producer.close()


def _stuck(stages: Pipeline, batch: BatchId, said: str) -> Any:
    report = audit(stages.settings, batch)
    assert report.whereabouts is not None
    return report if any(said in stuck.said for stuck in report.whereabouts.stuck) else None
