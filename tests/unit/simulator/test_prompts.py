"""What the simulator reads from a request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.simulator.prompts import BadRequest, read_chat, read_completion


def chat(*messages: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": messages, **fields}).encode()


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def calls(*ids: str) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in ids
        ],
    }


def tool(name: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": content}


def test_the_last_user_message_is_the_prompt_and_all_words_count() -> None:
    system = {"role": "system", "content": "Be brief."}
    prompt = read_chat(chat(system, user("one two"), {"role": "assistant", "content": "yes"}, user("three")))
    assert prompt.text == "three"
    assert prompt.words == 6
    assert prompt.rounds == 0


def test_parts_of_a_message_are_joined_and_images_have_no_words() -> None:
    parts = [
        {"type": "text", "text": "what is"},
        {"type": "image_url", "image_url": {"url": "data:,x"}},
        {"type": "text", "text": "this"},
    ]
    prompt = read_chat(chat(user(parts)))
    assert prompt.text.split() == ["what", "is", "this"]
    assert prompt.words == 3


def test_rounds_of_tool_calls_are_counted_from_the_last_user_message() -> None:
    first = [user("a"), calls("x"), tool("x", "1")]
    assert read_chat(chat(*first)).rounds == 1
    prompt = read_chat(chat(*first, calls("y", "z"), tool("z", "3"), tool("y", "2")))
    assert (prompt.rounds, prompt.tool_content) == (2, "2")
    assert read_chat(chat(*first, user("b"))).rounds == 0


@pytest.mark.parametrize(
    "messages",
    [
        [user("a"), calls("x")],
        [user("a"), calls("x", "y"), tool("x", "1")],
        [user("a"), calls("x"), user("b")],
        [user("a"), tool("x", "1")],
        [user("a"), calls("x"), tool("x", "1"), tool("x", "1")],
        [],
    ],
)
def test_a_history_that_no_model_takes_is_refused(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(BadRequest):
        read_chat(chat(*messages))


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"messages": []}', b"\xff", b'{"model": "m"}'])
def test_a_body_that_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        read_chat(body)


def test_streams_are_refused() -> None:
    with pytest.raises(BadRequest, match="stream"):
        read_chat(chat(user("a"), stream=True))
    with pytest.raises(BadRequest, match="stream"):
        read_completion(b'{"model": "m", "prompt": "a", "stream": true}')
    assert read_chat(chat(user("a"), stream=False)).text == "a"


@pytest.mark.parametrize(
    ("prompt", "texts", "words"),
    [
        ("one two", ("one two",), 2),
        (["one two", "three"], ("one two", "three"), 3),
        ([1, 2, 3], ("",), 3),
        ([[1, 2], [3]], ("", ""), 3),
        ([], ("",), 0),
    ],
)
def test_completion_prompts_in_every_form(prompt: Any, texts: tuple[str, ...], words: int) -> None:
    read = read_completion(json.dumps({"model": "m", "prompt": prompt}).encode())
    assert (read.texts, read.words) == (texts, words)


def test_repetitions_are_told_by_text_and_round() -> None:
    one = read_chat(chat(user("a"))).digest()
    assert one == read_chat(chat({"role": "system", "content": "s"}, user("a"))).digest()
    assert one != read_chat(chat(user("b"))).digest()
    assert one != read_chat(chat(user("a"), calls("x"), tool("x", "1"))).digest()
