"""Tool loops and workflows against plain sequential programs that do the same with ordinary JSON.

For any script of turns and tool results the output is that of the reference, the usage is the sum over the
turns, and a record that fails costs nothing; for any workflow every request that succeeded is billed once,
also when the record is taken up again behind any of its steps.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from schemas.ids import BatchId
from schemas.money import Price, Usage
from schemas.records import Answered, Billed, Closed, Failed, Step, UsageRow
from streams.core import answers, pricing
from streams.core.answers import Answer
from streams.core.toolconfig import WorkflowConfig
from streams.core.toolloop import Done, RunTools, ToolLoop
from streams.core.verdicts import Effects, Spec, Tally, decide
from streams.core.workflow import Completed, Ended, Run, Workflow
from tests.support import facts

ENDPOINT = "/v1/chat/completions"
PRICE = Price("price_x", 150_000_001, 75_000_003, 600_000_007, 5_000)
TEXT = st.text(max_size=8)


def usages() -> st.SearchStrategy[Any]:
    """Usage as a server may report it, usable or not."""
    count = st.integers(0, 1_000)
    good = st.tuples(count, count, st.integers(0, 1_000), count).map(
        lambda n: {
            "prompt_tokens": n[0] + n[2],
            "completion_tokens": n[1],
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": n[2]},
            "completion_tokens_details": {"reasoning_tokens": n[3]},
        }
    )
    plain = st.tuples(count, count).map(lambda n: {"prompt_tokens": n[0], "completion_tokens": n[1]})
    return st.one_of(good, plain, good, st.sampled_from([None, {}, {"prompt_tokens": "1"}, 5]))


@st.composite
def turns(draw: st.DrawFn) -> dict[str, Any]:
    """An answer of the model."""
    wants = draw(st.booleans())
    message: dict[str, Any] = {"role": "assistant", "content": None if wants else draw(TEXT), "x": draw(TEXT)}
    if wants:
        calls = draw(st.integers(1, 3))
        message["tool_calls"] = [
            {"id": f"call_{i}", "type": "function", "function": {"name": draw(TEXT), "arguments": draw(TEXT)}}
            for i in range(calls)
        ]
    answer = {
        "id": draw(TEXT),
        "choices": [{"finish_reason": "tool_calls" if wants else "stop", "message": message}],
    }
    if draw(st.booleans()):
        answer["openrelay"] = draw(TEXT)
    return answer | {"usage": draw(usages()), "after": draw(TEXT)}


Script = list[tuple[dict[str, Any], str | None]]
"""The model's answers, each with what the tools say after it; None when they fail."""


def reference(request: dict[str, Any], script: Script, most: int) -> tuple[list[Any], dict[str, Any] | None]:
    """Everything the model is sent, and the output; None when the record fails."""
    request = copy.deepcopy(request)
    sent = []
    total: list[int] | None = [0, 0, 0, 0]
    for rounds, (answer, said) in enumerate(script):
        sent.append(copy.deepcopy(request))
        usage, _ = answers.usage_of(answer["usage"])
        if usage is None or total is None:
            total = None
        else:
            total = [a + b for a, b in zip(total, msgspec.structs.astuple(usage), strict=True)]
        choice = answer["choices"][0]
        if choice["finish_reason"] != "tool_calls" or rounds == most:
            if not rounds:
                return sent, answer
            summed = None
            if total is not None:
                prompt, completion, cached, reasoning = total
                summed = {
                    "prompt_tokens": prompt,
                    "completion_tokens": completion,
                    "total_tokens": prompt + completion,
                    "prompt_tokens_details": {"cached_tokens": cached},
                    "completion_tokens_details": {"reasoning_tokens": reasoning},
                }
            return sent, answer | {"usage": summed, "openrelay": {"tool_rounds": rounds}}
        if said is None:
            return sent, None
        request["messages"].append(choice["message"])
        for call in choice["message"]["tool_calls"]:
            content = f"{call['id']} {said}"
            request["messages"].append({"role": "tool", "tool_call_id": call["id"], "content": content})
    raise AssertionError("the script is too short")


def written(value: Any, indent: int | None) -> bytes:
    return json.dumps(value, indent=indent, ensure_ascii=bool(indent)).encode()


def ours(
    request: bytes, script: Script, most: int, indent: int | None
) -> tuple[list[bytes], Answered | Failed]:
    loop = ToolLoop(most)
    sent = []
    fields: dict[str, Any] = {"batch": BatchId("b"), "index": 0, "custom_id": "r0", "origin": (0, 0)}
    for turn, said in script:
        body = loop.request(request)
        assert body is not None
        sent.append(body)
        raw = written(turn, indent)
        answer = answers.read(raw, ENDPOINT)
        assert isinstance(answer, Answer)
        assert not loop.fault(answer)
        loop, action = loop.answered(raw, answer)
        if isinstance(action, Done):
            return sent, Answered(
                status_code=200,
                request_id="x",
                body=msgspec.Raw(action.body),
                usage=action.usage,
                unmetered=action.unmetered,
                **fields,
            )
        assert isinstance(action, RunTools)
        if said is None:
            return sent, Failed(code="tool_execution_failed", message="x", **fields)
        loop = loop.ran(action, [f"{call.id} {said}" for call in action.calls])
    raise AssertionError("the script is too short")


def spec() -> Spec:
    created = facts.created("b", total=2, rejected=0, price=PRICE)
    return Spec(created, 202611, frozenset({0}))


def judged(*results: Answered | Failed | Step | Closed) -> tuple[Tally, list[Effects]]:
    tally = Tally(spec())
    return tally, [decide(spec(), tally, offset, 5, result) for offset, result in enumerate(results)]


@given(
    st.lists(st.dictionaries(TEXT, TEXT, max_size=2), max_size=3),
    st.lists(st.tuples(turns(), st.none() | TEXT), min_size=6, max_size=6),
    st.integers(1, 5),
    st.sampled_from([None, 1]),
)
def test_a_tool_loop_is_its_sequential_reference(
    messages: list[Any], script: Script, most: int, indent: int | None
) -> None:
    request = {"model": "m", "messages": messages, "n": 1}
    expected_sent, expected = reference(request, script, most)
    sent, result = ours(written(request, indent), script, most, indent)
    assert [json.loads(each) for each in sent] == expected_sent
    for body, (answer, _) in zip(sent[1:], script, strict=False):
        message = written(answer, indent)
        start = message.index(b'"message":') + len(b'"message":')
        assert message[start : message.index(b'"after"')].lstrip()[:40] in body, "as the model wrote it"
    tally, (effects,) = judged(result)
    if expected is None:
        assert isinstance(result, Failed)
        assert not effects.usage
        assert tally.usage.cost_nano_usd == tally.usage.input == tally.usage.unmetered_requests == 0
        return
    assert isinstance(result, Answered)
    assert isinstance(result.body, msgspec.Raw)
    assert json.loads(bytes(result.body)) == expected
    usage, _ = answers.usage_of(expected["usage"])
    assert result.usage == usage
    assert tally.usage.cost_nano_usd == (0 if usage is None else sum(pricing.cost_parts(usage, PRICE)))
    assert tally.usage.unmetered_requests == (usage is None)


# ---- workflows ----

Outcome = Usage | str | None
"""What becomes of a request: billed, failed with a code, or succeeded without usable usage."""

STEPS = st.lists(
    st.lists(
        st.one_of(
            st.builds(Usage, st.integers(10, 50), st.integers(0, 50), st.integers(0, 9), st.just(0)),
            st.sampled_from(["request_time_limit", "model_unavailable"]),
            st.none(),
        ),
        min_size=1,
        max_size=4,
    ),
    max_size=5,
)
ENDS = st.sampled_from(
    [b'{"status":"completed","output":[1]}', b'{"status":"failed","error":{"message":"m"}}']
)


def configured(most_steps: int, most_requests: int, most_tokens: int) -> WorkflowConfig:
    return WorkflowConfig(
        url="https://x.example",
        authorization=None,
        context=None,
        timeout_ms=1,
        max_steps=most_steps,
        max_requests=most_requests,
        max_tokens=most_tokens,
    )


def walk(
    flow: Workflow, steps: list[list[Outcome]], end: bytes, done: list[Step]
) -> tuple[Completed | Ended, list[Step]]:
    """Run a workflow from where it is to its end, one request after the other; the steps it wrote down."""
    while True:
        if flow.step == len(steps):
            action = flow.answered(end)
            assert not isinstance(action, Run)
            return action, done
        wanted = [{"id": f"q{flow.step}-{i}", "body": {}} for i in range(len(steps[flow.step]))]
        action = flow.answered(json.dumps({"status": "continue", "requests": wanted}).encode())
        if not isinstance(action, Run):
            return action, done
        for request, outcome in zip(action.requests, steps[flow.step], strict=True):
            assert json.loads(request.body) == {"model": "m"}
            if not flow.may_start():
                return flow.out_of_tokens, done
            if isinstance(outcome, str):
                flow.failed(request, outcome, "x")
            else:
                flow.succeeded(request, 200, b"{}", outcome, "" if outcome else "usage missing")
        flow.end_step()
        done = [*done, step_of(flow)]


def step_of(flow: Workflow) -> Step:
    return Step(
        batch=BatchId("b"),
        index=0,
        custom_id="r0",
        origin=(0, 0),
        step=flow.step,
        requests=flow.requests,
        billed=list(flow.billed),
        unbilled=list(flow.unbilled),
        body=msgspec.Raw(flow.results),
    )


def failed(flow: Workflow) -> Failed:
    return Failed(
        batch=BatchId("b"), index=0, custom_id="r0", origin=(0, 0), code="x", message="x", billed=flow.billed
    )


def rows(effects: list[Effects]) -> list[UsageRow]:
    return [row for effect in effects for row in effect.usage]


@given(STEPS, ENDS, st.integers(1, 5), st.integers(1, 12), st.integers(1, 400), st.data())
def test_every_succeeded_request_of_a_workflow_is_billed_once(
    steps: list[list[Outcome]], end: bytes, most_steps: int, most_requests: int, most_tokens: int, data: Any
) -> None:
    config = configured(most_steps, most_requests, most_tokens)
    flow = Workflow(config, "m")
    action, written_down = walk(flow, steps, end, [])

    expected: list[Billed] = []
    tokens = started = begun = 0
    over = False
    for number, requests in enumerate(steps):
        if number == most_steps or started + len(requests) > most_requests:
            over = True
            break
        begun += 1
        for i, outcome in enumerate(requests):
            if tokens >= most_tokens:
                over = True
                break
            started += 1
            if not isinstance(outcome, str):
                expected.append(Billed(number, f"q{number}-{i}", outcome, "" if outcome else "usage missing"))
                tokens += 0 if outcome is None else outcome.input + outcome.output
        if over:
            break
    assert flow.billed == expected
    assert (isinstance(action, Ended) and action.code == "workflow_limit_exceeded") == over
    report = flow.report(PRICE)
    assert (report.workflow_steps, report.workflow_requests) == (begun, started)

    tally, effects = judged(failed(flow))
    assert [(row.entry_id, row.input_tokens) for row in rows(effects)] == [
        (f"usage:{each.step}:{each.id}", each.usage.input if each.usage else 0) for each in expected
    ]
    assert tally.usage.cost_nano_usd == report.usage.cost_nano_usd
    assert tally.usage.cost_nano_usd == sum(
        sum(pricing.cost_parts(each.usage, PRICE)) for each in expected if each.usage
    )
    assert tally.usage.unmetered_requests == report.usage.unmetered_requests

    if written_down:
        step = data.draw(st.sampled_from(written_down))
        assert isinstance(step.body, msgspec.Raw)
        second = Workflow(config, "m")
        second.resume(step, bytes(step.body))
        again, _ = walk(second, steps, end, [])
        assert (again, second.billed, second.report(PRICE)) == (action, flow.billed, report)


@given(STEPS.filter(bool), st.integers(0, 5), st.sampled_from(["cancelled", "expired"]))
def test_a_closed_batch_bills_the_last_accepted_step(
    steps: list[list[Outcome]], count: int, reason: str
) -> None:
    flow = Workflow(configured(9, 99, 10**9), "m")
    _, written_down = walk(flow, steps, b'{"status":"completed"}', [])
    accepted = written_down[: max(1, min(count, len(written_down)))]
    other = msgspec.structs.replace(accepted[-1], billed=[Billed(0, "other", Usage(9_999, 1))])
    closed = Closed(batch=BatchId("b"), partition=0, reason=reason)
    tally, effects = judged(*accepted, other, closed)
    assert effects[len(accepted)].waste, "the first of a step holds"
    assert len(rows(effects)) == len(accepted[-1].billed)
    assert effects[-1].settled is not None
    assert effects[-1].settled.failed == 2
    (line,) = effects[-1].cut_off
    told = json.loads(bytes(line.line))
    assert told["error"]["code"] == f"batch_{reason}"
    assert told["openrelay"]["workflow_steps"] == len(accepted)
    assert told["openrelay"]["usage"]["cost_nano_usd"] == tally.usage.cost_nano_usd

    # A settler that starts from the ledger in between reads the named step again.
    half = Tally(spec())
    for offset, step in enumerate(accepted):
        decide(spec(), half, offset, 5, step)
    ledger = half.ledger(spec())
    assert ledger.steps == {0: len(accepted) - 1}
    restored = Tally.restore(spec(), ledger)
    decide(spec(), restored, len(accepted) - 1, 5, accepted[-1])
    decide(spec(), restored, len(accepted), 5, other)
    assert decide(spec(), restored, len(accepted) + 1, 5, closed) == effects[-1]
