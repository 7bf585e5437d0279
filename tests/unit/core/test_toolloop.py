"""One turn at a time: what goes on, what is refused, which bytes change."""

from __future__ import annotations

import json
from typing import Any

import pytest

from schemas.money import Usage
from streams.core import answers, bodies
from streams.core.answers import Answer
from streams.core.judge import CodedFailure, Reply, Server, judge
from streams.core.sse import EventStream
from streams.core.toolloop import Done, RunTools, ToolLoop

ENDPOINT = "/v1/chat/completions"
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def turn(calls: Any, reason: str = "tool_calls", **message: Any) -> bytes:
    fields = {"role": "assistant", "content": None, "tool_calls": calls} | message
    choices = [{"index": 0, "message": fields, "finish_reason": reason}]
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    return json.dumps({"choices": choices, "usage": usage}).encode()


def read(body: bytes) -> Answer:
    answer = answers.read(body, ENDPOINT)
    assert isinstance(answer, Answer)
    return answer


@pytest.mark.parametrize(
    "calls",
    [
        None,
        [],
        {},
        "x",
        [1],
        [CALL | {"id": 7}],
        [{"function": CALL["function"]}],
        [{"id": "a"}],
        [CALL | {"function": {"name": "f"}}],
        [CALL | {"function": {"name": "f", "arguments": {}}}],
        [CALL, CALL],
    ],
)
def test_an_answer_that_asks_for_tools_nobody_could_run_is_none(calls: Any) -> None:
    body = turn(calls)
    assert ToolLoop(8).fault(read(body))
    assert not ToolLoop(1, rounds=1).fault(read(body)), (
        "with its rounds used up it is an answer like any other"
    )
    judgement = judge(
        Reply(200, body, None, None),
        endpoint=ENDPOINT,
        attempts=0,
        max_attempts=1,
        backoff_s=1,
        jitter=0,
        fault=ToolLoop(8).fault,
    )
    assert judgement.server is Server.FAILING
    assert isinstance(judgement.record, CodedFailure)
    assert judgement.record.code == "invalid_model_response"


def test_a_choice_whose_message_is_no_object() -> None:
    body = b'{"choices":[{"message":"x","finish_reason":"tool_calls"}]}'
    assert ToolLoop(8).fault(read(body))


def test_tool_calls_do_not_matter_when_the_model_has_stopped() -> None:
    body = turn([CALL], reason="stop")
    _, action = ToolLoop(8).answered(body, read(body))
    assert action == Done(body, Usage(3, 2), "")


def test_the_assistant_message_goes_back_byte_for_byte() -> None:
    message = (
        b'{ "role":"assistant", "content" : "\\u00e9\xc3\xa9", "x":1.50, "tool_calls":[%s ]}'
        % json.dumps(CALL).encode()
    )
    body = b'{"choices":[ {"finish_reason":"tool_calls","message":%s}]}' % message
    loop, action = ToolLoop(8).answered(body, read(body))
    assert isinstance(action, RunTools)
    assert action.written == b"[%s ]" % json.dumps(CALL).encode()
    loop = loop.ran(action, ['"\n'])
    request = b'{"messages" : [ ] , "model":"m"}'
    told = b'{"tool_call_id":"a","content":"\\"\\n","role":"tool"}'
    assert loop.request(request) == b'{"messages" : [ %s,%s] , "model":"m"}' % (message, told)


def test_a_request_without_a_list_of_messages_cannot_go_on() -> None:
    body = turn([CALL])
    loop, action = ToolLoop(8).answered(body, read(body))
    assert isinstance(action, RunTools)
    loop = loop.ran(action, ["x"])
    assert loop.request(b'{"messages":"x"}') is None
    assert loop.request(b'{"model":"m"}') is None


def test_a_turn_without_usage_is_not_made_up_for_by_others() -> None:
    loop = ToolLoop(8)
    for usage in (
        b'{"prompt_tokens":3,"completion_tokens":2}',
        b"null",
        b'{"prompt_tokens":3,"completion_tokens":2}',
    ):
        body = turn([CALL]).replace(b'{"prompt_tokens": 3, "completion_tokens": 2}', usage)
        loop, action = loop.answered(body, read(body))
        assert isinstance(action, RunTools)
        loop = loop.ran(action, ["x"])
    body = turn(None, reason="stop")
    _, done = loop.answered(body, read(body))
    assert isinstance(done, Done)
    assert (done.usage, done.unmetered) == (None, "usage missing")
    assert json.loads(done.body)["usage"] is None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"{}", b'{"a":1,"b":[2]}'),
        (b"{ }", b'{"a":1,"b":[2] }'),
        (b'{"x":"a"}', b'{"x":"a","a":1,"b":[2]}'),
        (b'{"a": {"a":7} , "x":1 }', b'{"a": 1 , "x":1,"b":[2] }'),
        (b'{"b":null,"a":"}"}', b'{"b":[2],"a":1}'),
        (b'{"\\u0061":3,"a":4,"b":5}', b'{"\\u0061":1,"a":1,"b":[2]}'),
        (b'{"x":"\\\\","b":-1.5e3}', b'{"x":"\\\\","b":[2],"a":1}'),
        (b'{"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}", None),
    ],
)
def test_members_are_set_where_they_are(before: bytes, after: bytes | None) -> None:
    changed = bodies.with_members(before, {"a": b"1", "b": b"[2]"})
    assert changed == (before[:-1] + b',"a":1,"b":[2]}' if after is None else after)


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (b"data: a\n\n", [b"a"]),
        (b"data:a\r\n\r\ndata: b\r\rdata: c\n\n", [b"a", b"b", b"c"]),
        (b"data:  a\ndata\ndata: b\nid: 1\nretry: 5\n\n", [b" a\n\nb"]),
        (b"\xef\xbb\xbfdata: a\n\n: comment\n\n\n\ndata: b\n\n", [b"a", b"b"]),
        (b"event: ping\ndata: a\n\nevent: message\ndata: b\n\ndata: c\n\n", [b"b", b"c"]),
        (b"data: a\n\ndata: cut off\n", [b"a"]),
        (b"datas: a\n\ndata: b\x00\xff\n\n", [b"b\x00\xff"]),
        (b"", []),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 1_000])
def test_event_streams_in_pieces_of_any_size(text: bytes, messages: list[bytes], size: int) -> None:
    stream = EventStream()
    found = [m for at in range(0, len(text), size) for m in stream.feed(text[at : at + size])]
    assert found == messages
