"""What the simulated model answers."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from services.simulator.answers import Delivery, Reply, answer
from services.simulator.behaviours import parse
from services.simulator.prompts import Prompt, read_chat, read_completion

NOW_S = 1_790_000_000.5

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"enum": ["C", "F"]},
                "brief": {"type": "boolean"},
                "stations": {"type": "array"},
                "area": {"type": "object", "properties": {"name": {"type": "string"}}},
            },
        },
    },
}


def ask(text: str, **fields: Any) -> Reply:
    return reply(read_chat(_chat([{"role": "user", "content": text}], **fields)))


def reply(prompt: Prompt) -> Reply:
    return answer(prompt, parse(prompt.text, prompt.rounds), 7, NOW_S)


def _chat(messages: list[dict[str, Any]], **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": messages, **fields}).encode()


def body(text: str, **fields: Any) -> Any:
    return json.loads(ask(text, **fields).body)


def test_an_ordinary_answer() -> None:
    got = ask("Name three primary colors.")
    assert got.status == 200
    assert json.loads(got.body) == {
        "id": "chatcmpl-000000000007",
        "object": "chat.completion",
        "created": 1_790_000_000,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "You asked: Name three primary colors."},
                "finish_reason": "stop",
                "logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 6,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
        "system_fingerprint": "fp_openrelay_simulator",
    }


def test_max_tokens_cuts_the_answer() -> None:
    for field in ("max_tokens", "max_completion_tokens"):
        got = body("Name three primary colors.", **{field: 3})
        assert got["choices"][0]["message"]["content"] == "You asked: Name"
        assert got["choices"][0]["finish_reason"] == "length"
        assert got["usage"]["completion_tokens"] == 3


def test_completions_answer_every_prompt() -> None:
    got = json.loads(reply(read_completion(b'{"model": "m", "prompt": ["one", "two three"]}')).body)
    assert got["object"] == "text_completion"
    assert got["id"].startswith("cmpl-")
    assert [choice["index"] for choice in got["choices"]] == [0, 1]
    assert [choice["text"] for choice in got["choices"]] == ["You asked: one", "You asked: two three"]
    assert got["usage"]["total_tokens"] == 3 + 7


@pytest.mark.parametrize("status", [302, 400, 401, 404, 408, 422, 429, 500, 503])
def test_statuses(status: int) -> None:
    got = ask(f"status:{status}")
    assert got.status == status
    if status == 302:
        assert got.headers.startswith(b"location: ")
    else:
        error = json.loads(got.body)["error"]
        assert set(error) == {"message", "type", "code", "param"}
        assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")


def test_particular_statuses() -> None:
    assert ask("status:403").body == b""
    assert json.loads(ask("status:400").body)["error"]["code"] == "context_length_exceeded"
    assert b"retry-after: 2.5\r\n" in ask("retry-after:2.5:1").headers
    unknown = ask("unknown-model")
    assert unknown.status == 404
    assert json.loads(unknown.body)["error"]["code"] == "model_not_found"


def test_unusable_usage() -> None:
    assert body("usage:null")["usage"] is None
    assert body("usage:null")["choices"][0]["finish_reason"] == "length"
    assert "usage" not in body("usage:missing")
    assert body("usage:negative")["usage"]["completion_tokens"] < 0
    assert isinstance(body("usage:string")["usage"]["prompt_tokens"], str)
    assert isinstance(body("usage:float")["usage"]["prompt_tokens"], float)
    assert body("usage:huge")["usage"]["prompt_tokens"] == 1e30
    usage = body("usage:badtotal")["usage"]
    assert usage["total_tokens"] != usage["prompt_tokens"] + usage["completion_tokens"]
    usage = body("usage:overcached")["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"]


def test_chosen_usage() -> None:
    assert body("usage:100/20")["usage"]["total_tokens"] == 120
    assert body("usage:100/20/40/5")["usage"] == {
        "prompt_tokens": 100,
        "completion_tokens": 20,
        "total_tokens": 120,
        "prompt_tokens_details": {"cached_tokens": 40},
        "completion_tokens_details": {"reasoning_tokens": 5},
    }


def test_bodies_that_are_no_answers() -> None:
    assert ask("empty").body == b"{}"
    for word in ("nonjson", "html"):
        with pytest.raises(json.JSONDecodeError):
            json.loads(ask(word).body)
    assert "choices" not in body("nochoices")
    assert body("nochoice")["choices"] == []
    assert body("nomessage")["choices"][0]["message"] is None
    assert ask('json:{"a":  1e2}').body == b'{"a":  1e2}'
    assert ask("deep:200").body.count(b"[" * 200) == 1


def test_size_and_coding() -> None:
    assert len(body("big:1000")["choices"][0]["message"]["content"]) == 1000
    zipped = ask("gzip")
    assert b"content-encoding: gzip" in zipped.headers
    assert json.loads(gzip.decompress(zipped.body))["choices"]


def test_deliveries() -> None:
    assert ask("drop").delivery is Delivery.DROP
    assert ask("reset").delivery is Delivery.RESET
    assert ask("half").delivery is Delivery.HALF
    dripping = ask("drip:0.5")
    assert (dripping.delivery, dripping.pause_s) == (Delivery.DRIP, 0.5)


def test_a_tool_loop_from_its_first_round_to_its_text() -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "tools:2:2 go"}]
    ids: list[str] = []
    for turn in range(2):
        got = json.loads(reply(read_chat(_chat(messages, tools=[TOOL]))).body)
        assert got["choices"][0]["finish_reason"] == "tool_calls"
        message = got["choices"][0]["message"]
        assert message["content"] is None
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {
            "city": f"city {turn}",
            "days": turn,
            "unit": ["C", "F"][turn],
            "brief": turn == 0,
            "stations": [],
            "area": {"name": f"name {turn}"},
        }
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "weather"]
        messages.append(message)
        for call in message["tool_calls"]:
            ids.append(call["id"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"sunny {len(ids)}"})
    assert len(set(ids)) == 4
    got = json.loads(reply(read_chat(_chat(messages, tools=[TOOL]))).body)
    assert got["choices"][0]["finish_reason"] == "stop"
    assert "sunny 4" in got["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("kind", "arguments"), [("notjson", '{"query": '), ("array", "[1, 2]"), ("blank", "")]
)
def test_arguments_that_are_no_object(kind: str, arguments: str) -> None:
    call = body(f"tools:1 args:{kind}")["choices"][0]["message"]["tool_calls"][0]
    assert call["function"] == {"name": "lookup", "arguments": arguments}


def test_the_same_prompt_has_the_same_answer() -> None:
    assert ask("tools:1 again").body == ask("tools:1 again").body
