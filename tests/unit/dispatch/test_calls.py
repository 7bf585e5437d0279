"""The model's name in what a server with a name of its own for it says."""

from __future__ import annotations

import json

import pytest

from schemas.settings import Pool
from streams.core import answers
from streams.core.judge import CodedFailure, End, HttpFailure, Reply, Succeeded
from streams.dispatch.calls import named
from streams.pools.endpoint import Endpoint

MODEL, REMOTE = "openrelay/gemma", "google/gemma-3.1"
POOL = Endpoint(MODEL, Pool(base_url="http://x/v1", model=REMOTE))
SAME = Endpoint(MODEL, Pool(base_url="http://x/v1", model=MODEL))


def refusal(body: str) -> HttpFailure:
    return HttpFailure(Reply(400, body.encode(), None, None))


def said(body: str) -> str:
    end = named(refusal(body), POOL, MODEL)
    assert isinstance(end, HttpFailure)
    return end.reply.body.decode()


@pytest.mark.parametrize(
    "body",
    [
        {"model": "<meant>", "error": 1},
        {"error": {"model": "<meant>", "param": "model"}},
        {"error": {"message": "The model `<meant>` has no tools."}},
        {"message": "'<meant>' or \"<meant>\""},
        {"message": "`<other>-it` and `<other>'"},
        {"message": "model <other>", "<other>": "x", "param": "<other>"},
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_refusals_speak_of_the_model_as_the_customer_does(body: object, indent: int | None) -> None:
    text = json.dumps(body, indent=indent).replace("<other>", REMOTE)
    assert said(text.replace("<meant>", REMOTE)) == text.replace("<meant>", MODEL)


def test_text_and_nothing() -> None:
    assert said(f"model '{REMOTE}' is loading") == f"model '{MODEL}' is loading"
    assert said("") == ""


def test_a_name_with_letters_of_a_pattern() -> None:
    odd = Endpoint(MODEL, Pool(base_url="http://x/v1", model='a.b\\1 "c"'))
    end = named(refusal(json.dumps({"model": 'a.b\\1 "c"', "x": "`axb`"})), odd, MODEL)
    assert isinstance(end, HttpFailure)
    assert json.loads(end.reply.body) == {"model": MODEL, "x": "`axb`"}


def test_other_ends() -> None:
    body = json.dumps({"model": REMOTE, "choices": [{"message": {"content": f"`{REMOTE}`"}}]}).encode()
    answer = answers.read(body, "/v1/chat/completions")
    assert isinstance(answer, answers.Answer)
    good = named(Succeeded(Reply(200, body, None, None), answer), POOL, MODEL)
    assert isinstance(good, Succeeded)
    assert json.loads(good.reply.body) == {
        "model": MODEL,
        "choices": [{"message": {"content": f"`{REMOTE}`"}}],
    }
    unchanged: list[End] = [CodedFailure("x", REMOTE), refusal(f"`{REMOTE}`")]
    assert [named(unchanged[0], POOL, MODEL), named(unchanged[1], SAME, MODEL)] == unchanged
