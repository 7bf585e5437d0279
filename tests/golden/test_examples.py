"""Every message and object as it is on the wire, byte for byte: what a release writes the next one reads."""

from __future__ import annotations

from importlib import resources
from typing import Any

import msgspec
import pytest

from schemas import topics
from schemas.batches import Batch, BatchError, BatchErrors, BatchList, BatchUsage, RequestCounts
from schemas.errors import ErrorBody, ErrorDetail
from schemas.facts import (
    BatchFact,
    Cancel,
    Cause,
    Claim,
    Created,
    Ended,
    Enqueued,
    FileDeleted,
    FileFact,
    FilePut,
    FileReleased,
    FileStored,
    FileUsed,
    KeyFact,
    KeyIssued,
    KeyRevoked,
    KeyRole,
    KeyUsed,
    Priority,
    Progress,
    ResultFile,
    Settled,
    Withdrawn,
)
from schemas.files import File, FileDeletion, FileList, Presigned
from schemas.ids import BatchId, FileId, OrganizationId
from schemas.lines import InputLine, LineError, LineResponse, ResultLine
from schemas.money import Price, Usage, UsageTotals
from schemas.records import (
    Answered,
    Billed,
    Closed,
    DoneSet,
    Failed,
    Ledger,
    Line,
    Ref,
    Rejected,
    Remainder,
    Request,
    Result,
    Step,
    UsageChunk,
    UsageRow,
)
from schemas.records import ResultLine as ResultMessage
from schemas.tools import ExecuteAnswer, ExecuteRequest, ToolResult
from schemas.workflows import (
    CallbackAnswer,
    CallbackRequest,
    CompletedAnswer,
    ContinueAnswer,
    ErrorPart,
    FailedAnswer,
    RequestResult,
    ResponsePart,
    StepRequest,
    WorkflowError,
    WorkflowOutput,
    WorkflowReport,
)

BATCH = BatchId("batch_00112233445566778899aabbccddeeff")
FILE = FileId("file-00112233445566778899aabbccddeeff")
ORG = OrganizationId("org_acme")
BODY = msgspec.Raw(b'{"model": "openrelay/gpt-oss-120b", "messages": []}')
PRICE = Price("price_0123456789abcdef01234567", 150_000_000, 75_000_000, 600_000_000, 5_000)
TOTALS = UsageTotals(input=34, output=58, cached=2, reasoning=0, cost_nano_usd=19_875, billed_records=2)
CREATED = Created(
    batch=BATCH,
    organization=ORG,
    endpoint="/v1/chat/completions",
    priority=Priority.STANDARD,
    input_file_id=FILE,
    input_object=f"batches/{BATCH}/input.jsonl",
    rejected_object=f"batches/{BATCH}/rejected.jsonl",
    completion_window="24h",
    window_s=86_400.0,
    total=3,
    rejected=1,
    model="openrelay/gpt-oss-120b",
    price=PRICE,
    metadata={"job": "nightly"},
    api_key_id="key_1",
    claim="claim_1",
)
SETTLED = Settled(batch=BATCH, completed=2, failed=1, usage=TOTALS, cause=Cause.DONE)
LINE = ResultLine(
    id="batch_req_1",
    custom_id="r0",
    response=LineResponse(200, "req_1", msgspec.Raw(b'{"choices":[]}')),
    error=None,
)
OUTPUT_FILE = ResultFile(
    file_id=FileId(f"file-{BATCH}-output"),
    object=f"batches/{BATCH}/output.jsonl",
    bytes=412,
    lines=2,
    sha256="00" * 32,
)

EXAMPLES: dict[str, tuple[Any, Any]] = {
    "batches.created": (BatchFact, CREATED),
    "batches.enqueued": (
        BatchFact,
        Enqueued(
            batch=BATCH,
            attempt="0011223344556677",
            topic=topics.requests_name("openrelay/gpt-oss-120b"),
            extents={0: [(10, 11)], 5: [(7, 7), (9, 12)]},
        ),
    ),
    "batches.cancel": (BatchFact, Cancel(batch=BATCH)),
    "batches.withdrawn": (BatchFact, Withdrawn(batch=BATCH)),
    "batches.settled": (BatchFact, SETTLED),
    "batches.ended": (
        BatchFact,
        Ended(
            batch=BATCH,
            status="completed",
            output=OUTPUT_FILE,
            error=None,
            created=CREATED,
            created_at_ms=1_795_971_601_000,
            settled=SETTLED,
        ),
    ),
    "files.stored": (FileFact, FileStored(file=FILE, organization=ORG, object=f"uploads/{FILE}", bytes=412)),
    "files.deleted": (FileFact, FileDeleted(file=FILE, organization=ORG, seen=17)),
    "files.put": (
        FileFact,
        FilePut(file=FILE, organization=ORG, object=f"puts/{FILE}.0011223344556677.1795975200", bytes=412),
    ),
    "files.used": (FileFact, FileUsed(file=FILE, batch=BATCH, attempt="018f00112233445566778899aabb")),
    "files.released": (FileFact, FileReleased(file=FILE, attempt="018f00112233445566778899aabb")),
    "keys.issued": (
        KeyFact,
        KeyIssued(
            key_id="key_1",
            sha256="00" * 32,
            organization=ORG,
            role=KeyRole.FINANCE,
            name="ci",
            hint="or_abcd",
        ),
    ),
    "keys.revoked": (KeyFact, KeyRevoked(key_id="key_1")),
    "keys.used": (KeyFact, KeyUsed(key_id="key_1")),
    "claims": (
        Claim,
        Claim(
            claim="claim_1", scope="key:org_acme:k", body_sha256="00" * 32, batch=BATCH, input_file_id=FILE
        ),
    ),
    "progress": (Progress, Progress(batch=BATCH, upto=42, completed=1, failed=0, usage=TOTALS)),
    "requests": (
        Request,
        Request(batch=BATCH, index=0, attempt="0011223344556677", custom_id="r0", body=BODY),
    ),
    "requests.ref": (
        Request,
        Request(
            batch=BATCH,
            index=1,
            attempt="0011223344556677",
            custom_id="r1",
            ref=Ref(f"batches/{BATCH}/input.jsonl", 4096, 300_000),
            sealed=b"\x00\x01sealed",
        ),
    ),
    "results.output": (
        Result,
        Answered(
            batch=BATCH,
            index=0,
            custom_id="r0",
            origin=(5, 3),
            status_code=200,
            request_id="req_1",
            body=msgspec.Raw(b'{"choices":[]}'),
            usage=Usage(17, 29, 2, 4),
        ),
    ),
    "results.error": (
        Result,
        Failed(
            batch=BATCH, index=1, custom_id="r1", origin=(5, 4), code="request_time_limit", message="too long"
        ),
    ),
    "results.step": (
        Result,
        Step(
            batch=BATCH,
            index=2,
            custom_id="r2",
            origin=(5, 5),
            step=1,
            requests=2,
            billed=[Billed(0, "a", Usage(17, 29, 2, 4)), Billed(0, "b", None, "usage missing")],
            unbilled=["c"],
            body=msgspec.Raw(b"[]"),
        ),
    ),
    "results.closed": (Result, Closed(batch=BATCH, partition=5, reason="cancelled")),
    "outputs": (ResultMessage, Line(batch=BATCH, index=0, line=msgspec.Raw(msgspec.json.encode(LINE)))),
    "errors.remainder": (
        ResultMessage,
        Remainder(batch=BATCH, seen=b"\x05", code="batch_cancelled", message="cancelled"),
    ),
    "usage": (
        UsageChunk,
        UsageChunk(
            organization=ORG,
            billing_month=202611,
            batch=BATCH,
            model="openrelay/gpt-oss-120b",
            endpoint="/v1/chat/completions",
            tier="standard",
            api_key_id="key_1",
            price_id=PRICE.price_id,
            rows=[
                UsageRow(
                    request_index=0,
                    entry_id="usage",
                    completed_at_ms=1_795_971_601_000,
                    input_tokens=17,
                    cached_tokens=2,
                    output_tokens=29,
                    cost_input_nano=1_200,
                    cost_output_nano=8_700,
                    output_offset=41,
                )
            ],
        ),
    ),
    "ledger": (
        Ledger,
        Ledger(
            batch=BATCH,
            upto=42,
            seen=b"\x05",
            completed=2,
            failed=0,
            usage=TOTALS,
            closed={5: "cancelled"},
            settled=False,
        ),
    ),
    "done": (
        DoneSet,
        DoneSet(
            batch=BATCH,
            attempt="0011223344556677",
            topic="requests.x",
            partition=5,
            finished=b"\x03",
            started_upto=34,
            results_upto=42,
            attempts={7: 3},
        ),
    ),
    "rejected": (
        Rejected,
        Rejected(index=2, line=4, code="invalid_json", message="not JSON", param=None, custom_id=None),
    ),
    "line.input": (InputLine, InputLine(custom_id="r0", body=BODY)),
    "line.output": (ResultLine, LINE),
    "line.error": (
        ResultLine,
        ResultLine(
            id="batch_req_2",
            custom_id=None,
            response=None,
            error=LineError("invalid_json", "not JSON", None, 4),
        ),
    ),
    "batch": (
        Batch,
        Batch(
            id=BATCH,
            endpoint="/v1/chat/completions",
            model="openrelay/gpt-oss-120b",
            priority="standard",
            input_file_id=FILE,
            completion_window="24h",
            status="completed",
            created_at=1_795_971_601,
            in_progress_at=1_795_971_602,
            finalizing_at=1_795_971_603,
            completed_at=1_795_971_604,
            expires_at=1_796_058_001,
            output_file_id=FileId(f"file-{BATCH}-output"),
            request_counts=RequestCounts(3, 2, 1),
            usage=BatchUsage(input_tokens=34, output_tokens=58, total_tokens=92, cost_nano_usd=19_875),
            errors=BatchErrors([BatchError("invalid_json", "not JSON", None, 4, None)]),
            metadata={"job": "nightly"},
        ),
    ),
    "batch.list": (BatchList, BatchList(data=[], first_id=None, last_id=None, has_more=False)),
    "file": (
        File,
        File(
            id=FILE,
            bytes=412,
            created_at=1_795_971_601,
            expires_at=1_798_563_601,
            filename=f"{FILE}.jsonl",
            purpose="batch",
        ),
    ),
    "file.list": (FileList, FileList(data=[], first_id=None, last_id=None, has_more=False)),
    "file.deleted": (FileDeletion, FileDeletion(id=FILE)),
    "file.presigned": (
        Presigned,
        Presigned(file_id=FILE, put_url="https://example.com/put", expires_at=1_795_972_501),
    ),
    "tools.request": (
        ExecuteRequest,
        ExecuteRequest(
            "r0",
            msgspec.Raw(b'{"contract":"c-7"}'),
            msgspec.Raw(
                b'[{"id":"call_1","type":"function","function":{"name":"lookup","arguments":"{\\"city\\":\\"Rome\\"}"}}]'
            ),
        ),
    ),
    "tools.answer": (ExecuteAnswer, ExecuteAnswer([ToolResult("call_1", "18 degrees")])),
    "workflow.request": (
        CallbackRequest,
        CallbackRequest(
            "r0",
            msgspec.Raw(b"null"),
            1,
            msgspec.Raw(
                msgspec.json.encode(
                    [
                        RequestResult("a", "succeeded", ResponsePart(200, msgspec.Raw(b"{}")), None),
                        RequestResult("b", "failed", None, ErrorPart("request_time_limit", "too long")),
                    ]
                )
            ),
        ),
    ),
    "workflow.continue": (
        CallbackAnswer,
        ContinueAnswer([StepRequest("a", msgspec.Raw(b'{"messages":[]}'))]),
    ),
    "workflow.completed": (CallbackAnswer, CompletedAnswer(msgspec.Raw(b'{"pages":3}'))),
    "workflow.failed": (CallbackAnswer, FailedAnswer(WorkflowError("no pages", "empty"))),
    "workflow.output": (
        WorkflowOutput,
        WorkflowOutput(
            model="openrelay/gpt-oss-120b",
            output=msgspec.Raw(b'{"pages":3}'),
            openrelay=WorkflowReport(2, 3, BatchUsage(input_tokens=34, output_tokens=58, total_tokens=92)),
        ),
    ),
    "error": (ErrorBody, ErrorBody(ErrorDetail("no such batch", "invalid_request_error", "not_found", None))),
}


def golden(name: str) -> bytes:
    return resources.files("schemas").joinpath("examples", f"{name}.json").read_bytes().rstrip(b"\n")


@pytest.mark.parametrize("name", EXAMPLES)
def test_written_as_in_the_example(name: str) -> None:
    _, example = EXAMPLES[name]
    assert msgspec.json.encode(example) == golden(name)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_is_read_back(name: str) -> None:
    kind, example = EXAMPLES[name]
    assert msgspec.json.encode(msgspec.json.decode(golden(name), type=kind)) == msgspec.json.encode(example)


@pytest.mark.parametrize("name", [name for name in EXAMPLES if not name.startswith(("batch.", "file."))])
def test_fields_of_a_newer_release_are_ignored(name: str) -> None:
    kind, example = EXAMPLES[name]
    newer = golden(name)[:-1] + b',"a_field_of_tomorrow":1}'
    assert msgspec.json.encode(msgspec.json.decode(newer, type=kind)) == msgspec.json.encode(example)


def test_every_topic_and_fact_has_an_example() -> None:
    names = set(EXAMPLES)
    for topic in topics.CATALOGUE:
        assert any(name == topic.name or name.startswith(f"{topic.name}.") for name in names), topic.name
    for union, prefix in (
        (BatchFact, "batches"),
        (FileFact, "files"),
        (KeyFact, "keys"),
        (Result, "results"),
    ):
        for kind in union.__args__:
            assert f"{prefix}.{kind.__struct_config__.tag}" in names
    files = {
        entry.name.removesuffix(".json")
        for entry in resources.files("schemas").joinpath("examples").iterdir()
    }
    assert files == names
