"""One callback at a time: what it is sent, what it may answer, what its requests become."""

from __future__ import annotations

import json
from typing import Any

import pytest

from schemas.ids import BatchId
from schemas.money import Price, Usage
from schemas.records import Step
from streams.core import workflow as core
from streams.core.toolconfig import WorkflowConfig
from streams.core.workflow import MAX_MESSAGE, MAX_REQUEST_ID, Completed, Ended, Malformed, Run, Workflow

PRICE = Price("price_x", 1_000_000, 1_000_000, 1_000_000, 10_000)


def flow(context: bytes | None = None, **limits: int) -> Workflow:
    fields = {"timeout_ms": 1, "max_steps": 2, "max_requests": 4, "max_tokens": 100} | limits
    config = WorkflowConfig(url="https://x.example/", authorization=None, context=context, **fields)
    return Workflow(config, "m")


def go_on(*requests: tuple[str, bytes]) -> bytes:
    items = b",".join(b'{"id":%s,"body":%s}' % (json.dumps(name).encode(), body) for name, body in requests)
    return b'{"status":"continue","requests":[%s]}' % items


def run(workflow: Workflow, answer: bytes) -> Run:
    action = workflow.answered(answer)
    assert isinstance(action, Run)
    return action


def test_the_callback_is_sent_what_it_needs_and_the_same_again() -> None:
    workflow = flow(b'{ "n":1.50 }')
    first = b'{"custom_id":"r\xc3\xa9","context":{ "n":1.50 },"step":0,"results":[]}'
    assert workflow.request("ré") == workflow.request("ré") == first
    assert json.loads(flow().request("r"))["context"] is None


def test_bodies_are_kept_to_the_byte_but_for_a_missing_model() -> None:
    action = run(flow(), go_on(("a", b'{ "x" : 1.50 }'), ("b", b'{"model":"m","y":"\\u00e9"}'), ("c", b"{}")))
    bodies = [request.body for request in action.requests]
    assert bodies == [b'{ "x" : 1.50,"model":"m" }', b'{"model":"m","y":"\\u00e9"}', b'{"model":"m"}']


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"model": "other"}, "model_mismatch"),
        ({"model": None}, "model_mismatch"),
        ({"stream": True}, "stream_not_supported"),
        ({"openrelay": {}}, "invalid_openrelay"),
        ({"openrelay": None, "stream": True, "model": "other"}, "invalid_openrelay"),
    ],
)
def test_requests_that_may_not_run_come_back_failed(body: Any, code: str) -> None:
    workflow = flow()
    (request,) = run(workflow, go_on(("a", json.dumps(body).encode()))).requests
    assert request.refusal is not None
    assert request.refusal.code == code
    workflow.end_step()
    (result,) = json.loads(workflow.results)
    assert (result["status"], result["error"]["code"], result["response"]) == ("failed", code, None)
    assert workflow.report(PRICE).workflow_requests == 0


def test_results_are_in_the_order_of_the_requests() -> None:
    workflow = flow()
    a, b, c = run(workflow, go_on(("a", b"{}"), ("b", b'{"stream":true}'), ("c", b"{}"))).requests
    workflow.succeeded(c, 201, b'{ "c" : 1 }', Usage(3, 2), "")
    workflow.refused(a, 422, b'"no"')
    assert b.refusal is not None
    workflow.end_step()
    assert workflow.step == 1
    assert b'"body":{ "c" : 1 }' in workflow.results
    assert [(each["id"], each["status"]) for each in json.loads(workflow.results)] == [
        ("a", "failed"),
        ("b", "failed"),
        ("c", "succeeded"),
    ]


def test_the_step_after_the_last_and_the_request_over_the_limit_run_nothing() -> None:
    workflow = flow(max_steps=1)
    (a,) = run(workflow, go_on(("a", b"{}"))).requests
    assert workflow.may_start()
    workflow.failed(a, "request_time_limit", "x")
    workflow.end_step()
    ended = workflow.answered(go_on(("b", b"{}")))
    assert isinstance(ended, Ended)
    assert ended.code == "workflow_limit_exceeded"
    assert isinstance(workflow.answered(b'{"status":"completed"}'), Completed), "it may still end well"
    too_many = flow().answered(go_on(*((str(i), b"{}") for i in range(5))))
    assert isinstance(too_many, Ended)
    assert flow().answered(go_on(*((str(i), b"{}") for i in range(4))))


def test_an_id_is_used_once_in_a_record_whatever_became_of_its_request() -> None:
    before = flow(max_steps=9, max_requests=9)
    a, b, _ = run(before, go_on(("a", b"{}"), ("b", b"{}"), ("c", b'{"stream":true}'))).requests
    assert before.may_start()
    before.succeeded(a, 200, b"{}", Usage(1, 1), "")
    before.failed(b, "request_time_limit", "x")
    before.end_step()
    for workflow in (before, resumed(before, max_steps=9, max_requests=9)):
        for name in "abc":
            with pytest.raises(Malformed):
                workflow.answered(go_on(("d", b"{}"), (name, b"{}")))
        assert isinstance(workflow.answered(go_on(("d", b"{}"))), Run)


def test_requests_that_may_not_run_count_as_requests_of_their_step() -> None:
    before = flow()
    run(before, go_on(("a", b'{"stream":true}'), ("b", b'{"openrelay":{}}'), ("c", b'{"model":"other"}')))
    before.end_step()
    for workflow in (before, resumed(before)):
        ended = workflow.answered(go_on(("d", b"{}"), ("e", b"{}")))
        assert isinstance(ended, Ended)
        assert ended.code == "workflow_limit_exceeded"
        assert isinstance(workflow.answered(go_on(("d", b"{}"))), Run)
        assert workflow.report(PRICE).workflow_requests == 0


def resumed(before: Workflow, **limits: int) -> Workflow:
    """The workflow as somebody goes on with it who knows what was written down."""
    workflow = flow(**limits)
    step = Step(
        batch=BatchId("b"),
        index=0,
        custom_id="r",
        origin=(0, 0),
        step=before.step,
        requests=before.requests,
        billed=before.billed,
        unbilled=before.unbilled,
    )
    workflow.resume(step, before.results)
    return workflow


def test_tokens_are_looked_at_before_each_start() -> None:
    workflow = flow(max_tokens=10)
    a, b, _ = run(workflow, go_on(("a", b"{}"), ("b", b"{}"), ("c", b"{}"))).requests
    assert workflow.may_start()
    assert workflow.may_start()
    workflow.succeeded(a, 200, b"{}", Usage(9, 1), "")
    assert not workflow.may_start(), "the third does not start"
    workflow.succeeded(b, 200, b"{}", Usage(50, 50), "")
    report = workflow.report(PRICE)
    assert (report.workflow_steps, report.workflow_requests) == (1, 2)
    assert report.usage.total_tokens == 110
    assert report.usage.cost_nano_usd == 110


def test_the_results_of_a_step_have_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "MAX_RESULTS_BYTES", 20)
    workflow = flow()
    a, b, c = run(workflow, go_on(("a", b"{}"), ("b", b"{}"), ("c", b"{}"))).requests
    assert workflow.may_start()
    workflow.succeeded(a, 200, b'"%s"' % (b"x" * 18), Usage(1, 1), "")
    assert workflow.too_large is None
    assert workflow.may_start()
    workflow.refused(b, 400, b"1")
    assert workflow.too_large is not None
    assert workflow.too_large.code == "workflow_limit_exceeded"
    assert not workflow.may_start()
    workflow.succeeded(c, 200, b'"%s"' % (b"x" * 50), Usage(1, 1), "")
    assert [entry.id for entry in workflow.billed] == ["a", "c"], "what ran meanwhile is billed"
    workflow.end_step()
    assert len(workflow.results) < 350
    assert b"x" * 50 not in workflow.results
    assert workflow.size == len(workflow.results)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"status":"x"}',
        b'{"status":null}',
        b'{"status":"continue"}',
        b'{"status":"continue","requests":[]}',
        b'{"status":"continue","requests":{}}',
        b'{"status":"continue","requests":[{"id":"a"}]}',
        b'{"status":"continue","requests":[{"body":{}}]}',
        b'{"status":"completed","output":1,"output":2}',
        b'{"status":"completed","output":NaN}',
        b'{"status":"completed","output":"\xff"}',
        b'{"status":"completed","output":' + b"[" * 100_001 + b"]" * 100_001 + b"}",
        b'{"status":"failed"}',
        b'{"status":"failed","error":{"code":"x"}}',
        b'{"status":"failed","error":{"message":7}}',
        go_on(("", b"{}")),
        go_on(("a\n", b"{}")),
        go_on(("x" * (MAX_REQUEST_ID + 1), b"{}")),
        go_on(("a", b"{}"), ("a", b"{}")),
        go_on(("a", b"[]")),
        go_on(("a", b'"x"')),
        go_on(("a", b'{"x":1,"x":2}')),
    ],
)
def test_answers_that_are_none(answer: bytes) -> None:
    with pytest.raises(Malformed):
        flow().answered(answer)


def test_answers_keep_the_output_and_the_error() -> None:
    output = b'{ "pages" : [1.50, 12345678901234567890] }'
    assert flow().answered(b'{"status":"completed","output":%s,"more":1}' % output) == Completed(output)
    assert flow().answered(b'{"status":"completed"}') == Completed(b"null")
    said = flow().answered(b'{"status":"failed","error":{"code":"E7","message":"no","more":1}}')
    assert said == Ended("workflow_failed", "E7: no")
    long = flow().answered(json.dumps({"status": "failed", "error": {"message": "x" * 10_000}}).encode())
    assert isinstance(long, Ended)
    assert len(long.message) == MAX_MESSAGE
