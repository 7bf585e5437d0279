from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.core import answers
from streams.core.judge import (
    Again,
    Broken,
    CodedFailure,
    HttpFailure,
    Judgement,
    Outcome,
    Reply,
    Server,
    Succeeded,
    TimedOut,
    Unreachable,
    foreign_404,
    judge,
)
from streams.core.limits import STEPS, Limit

CHAT = "/v1/chat/completions"
GOOD = json.dumps(
    {"choices": [{"message": {"content": "x"}}], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
)


def decide(
    outcome: Outcome, attempts: int = 0, key_accepted: bool = False, no_such_route: bool = False
) -> Judgement:
    return judge(
        outcome,
        endpoint=CHAT,
        attempts=attempts,
        max_attempts=5,
        backoff_s=1.0,
        jitter=0.5,
        key_accepted=key_accepted,
        no_such_route=no_such_route,
    )


def reply(status: int, body: str = "", retry_after_s: float | None = None) -> Reply:
    return Reply(status, body.encode(), None, retry_after_s)


@pytest.mark.parametrize("status", [400, 404, 409, 413, 422])
def test_the_callers_mistake_ends_the_record_at_once(status: int) -> None:
    server, record = decide(reply(status, "{}"))
    assert (server, type(record)) == (Server.GOOD, HttpFailure)


@pytest.mark.parametrize("status", [500, 502, 504, 408, 301, 307])
def test_the_servers_failure_uses_up_attempts_and_then_shows_itself(status: int) -> None:
    assert decide(reply(status)).record == Again(0.75, attempt=True)
    last = decide(reply(status), attempts=4)
    assert last.record == HttpFailure(reply(status))


def test_waits_double_up_to_a_minute() -> None:
    waits = []
    for attempts in range(4):
        record = decide(Broken("reset"), attempts).record
        assert isinstance(record, Again)
        waits.append(record.wait_s)
    assert waits == [0.75, 1.5, 3.0, 6.0]


def test_what_is_not_json_is_said_once() -> None:
    record = decide(reply(200, '{"choices": ['), attempts=4).record
    assert isinstance(record, CodedFailure)
    assert record.message == "the model's answer could not be used: not JSON: Input data was truncated"
    record = decide(reply(200, '{"choices"; 1}'), attempts=4).record
    assert isinstance(record, CodedFailure)
    assert record.message.startswith("the model's answer could not be used: not JSON: expected ':' (byte")


def test_no_answer_to_the_end_is_unavailable() -> None:
    record = decide(Broken("reset"), attempts=4).record
    assert isinstance(record, CodedFailure)
    assert record.code == "model_unavailable"


@pytest.mark.parametrize("status", [429, 503])
def test_overload_waits_as_long_as_asked_and_is_no_attempt(status: int) -> None:
    server, record = decide(reply(status, retry_after_s=7.0), attempts=4)
    assert (server, record) == (Server.REFUSING, Again(7.0, attempt=False))


@pytest.mark.parametrize("asked", [None, 0.0])
def test_overload_waits_a_little_though_nobody_asks(asked: float | None) -> None:
    """A date in the past asks for no time."""
    record = decide(reply(503, retry_after_s=asked)).record
    assert isinstance(record, Again)
    assert 0.5 <= record.wait_s <= 1.0


@pytest.mark.parametrize(
    ("status", "body", "foreign"),
    [
        (404, '{"detail":"Not Found"}', True),
        (404, "<html>", True),
        (404, "", True),
        (404, '{"error":{"message":"no such tool"}}', False),
        (404, '{"object":"error","message":"no"}', False),
        (404, '{"error":{"message":"The model `x` does not exist"}}', False),
        (400, '{"detail":"Not Found"}', False),
    ],
)
def test_a_404_of_any_web_server_may_be_ours(status: int, body: str, foreign: bool) -> None:
    assert foreign_404(reply(status, body)) == foreign


def test_a_wrong_address_is_ours_to_fix() -> None:
    not_found = reply(404, '{"detail":"Not Found"}')
    assert decide(not_found, no_such_route=True) == (Server.MISCONFIGURED, Again(0.0, attempt=False))
    assert decide(not_found) == (Server.GOOD, HttpFailure(not_found))


def test_what_is_ours_to_fix_is_not_the_customers_failure() -> None:
    unknown = json.dumps({"error": {"message": "The model `x` does not exist", "code": "model_not_found"}})
    for outcome in (reply(401), reply(403), reply(404, unknown)):
        assert decide(outcome) == (Server.MISCONFIGURED, Again(0.0, attempt=False))


def test_a_403_is_the_records_own_when_our_key_is_taken_elsewhere() -> None:
    assert decide(reply(403), key_accepted=True) == (Server.GOOD, HttpFailure(reply(403)))


def test_an_endpoint_that_cannot_be_reached_is_no_attempt() -> None:
    assert decide(Unreachable("refused"), attempts=4) == (Server.OUT, Again(0.0, attempt=False))


def test_the_time_limit_is_final() -> None:
    record = decide(TimedOut()).record
    assert isinstance(record, CodedFailure)
    assert record.code == "request_time_limit"


@pytest.mark.parametrize(
    "body",
    [
        "",
        "<html>",
        "{}",
        '{"choices": []}',
        '{"choices": [{"message": null}]}',
        '{"choices": [1]}',
        "[]",
        '{"choices": {}}',
        GOOD[:-4],
        '{"choices": ' + "[" * 100_000,
    ],
)
def test_unusable_answers_are_failed_attempts(body: str) -> None:
    assert isinstance(decide(reply(200, body)).record, Again)
    record = decide(reply(200, body), attempts=4).record
    assert isinstance(record, CodedFailure)
    assert record.code == "invalid_model_response"


def answer(extra: str, usage: str = '{"prompt_tokens":3,"completion_tokens":2}') -> str:
    return f'{{"choices":[{{"message":{{"content":"x"}}}}],"usage":{usage},"extra":{extra}}}'


@pytest.mark.parametrize("deep", [501, 985, 10_000, 100_000])
def test_answers_nested_too_deeply_are_said_to_be(deep: int) -> None:
    record = decide(reply(200, answer("[" * deep + "]" * deep)), attempts=4).record
    assert record == CodedFailure(
        "invalid_model_response",
        "the model's answer could not be used: it is nested more than 500 levels deep",
    )


@pytest.mark.parametrize(
    "extra", ["1e400", "-1e400", "9" * 5_000, "[" * 499 + "]" * 499, '"' + "[" * 5_000 + '"']
)
def test_answers_may_hold_what_their_customers_can_read(extra: str) -> None:
    record = decide(reply(200, answer(extra))).record
    assert isinstance(record, Succeeded)
    assert record.answer.usage is not None
    assert answers.error_body(f'{{"error":{extra}}}'.encode()) == f'{{"error":{extra}}}'.encode()


def test_a_large_number_does_not_hide_what_is_wrong_elsewhere() -> None:
    for wrong in ("NaN", '"\\ud800"', "[", '{"a":1,"a":2}'):
        record = decide(reply(200, answer(f"[1e400,{wrong}]")), attempts=4).record
        assert isinstance(record, CodedFailure), wrong
        assert record.message.startswith("the model's answer could not be used: it "), record.message


@pytest.mark.parametrize("count", ["1e400", "-1e400", "9" * 5_000, "9" * 30])
def test_numbers_of_any_size_in_usage_bill_nothing(count: str) -> None:
    record = decide(reply(200, answer("0", f'{{"prompt_tokens":{count},"completion_tokens":2}}'))).record
    assert isinstance(record, Succeeded)
    assert record.answer.usage is None
    assert len(record.answer.unmetered) < 120


def test_a_good_answer() -> None:
    server, record = decide(reply(200, GOOD))
    assert server is Server.GOOD
    assert isinstance(record, Succeeded)
    assert record.answer.usage is not None
    assert (record.answer.usage.input, record.answer.usage.output) == (3, 2)


@pytest.mark.parametrize(
    "usage",
    [
        None,
        [],
        {},
        {"prompt_tokens": 1},
        {"prompt_tokens": -1, "completion_tokens": 1},
        {"prompt_tokens": "1", "completion_tokens": 1},
        {"prompt_tokens": 1.0, "completion_tokens": 1},
        {"prompt_tokens": 1e30, "completion_tokens": 1},
        {"prompt_tokens": True, "completion_tokens": 1},
        {"prompt_tokens": (1 << 40) + 1, "completion_tokens": 1},
        {"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 2}},
    ],
)
def test_unusable_usage_bills_nothing_and_says_why(usage: object) -> None:
    found, why = answers.usage_of(usage)
    assert found is None
    assert why


def test_a_wrong_total_does_not_matter() -> None:
    found, _ = answers.usage_of(
        {
            "prompt_tokens": 5,
            "completion_tokens": 6,
            "total_tokens": 99,
            "prompt_tokens_details": {"cached_tokens": None},
        }
    )
    assert found is not None
    assert (found.input, found.output, found.cached) == (5, 6, 0)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda x: st.lists(x) | st.dictionaries(st.text(), x),
)


@given(json_values, st.integers(1, 4))
def test_compact_json_is_the_same_json_on_one_line(value: object, indent: int) -> None:
    body = json.dumps(value, indent=indent, ensure_ascii=False).encode(errors="surrogatepass")
    compact = answers.compact(body)
    assert b"\n" not in compact
    assert json.loads(compact.decode(errors="surrogatepass")) == value


def test_error_bodies() -> None:
    assert answers.error_body(b"") == b"null"
    assert answers.error_body(b'{"error": 1}') == b'{"error": 1}'
    assert answers.error_body(b"<html>\xff") == json.dumps("<html>\ufffd", ensure_ascii=False).encode()
    assert len(answers.error_body(b"x" * 1_000_000)) == 64 * 1024 + 2


def test_one_decrease_a_cohort_and_a_slow_increase() -> None:
    limit = Limit(100)
    assert limit.value == 100
    for _ in range(50):
        limit.overloaded(sent_at=1.0, now=2.0)
    assert limit.value == 70
    limit.overloaded(sent_at=2.5, now=3.0)
    assert limit.value == 49
    for _ in range(49):
        limit.good(in_flight=48)
    assert 51 <= limit.value <= 52
    for _ in range(1_000):
        limit.good(in_flight=40)
    assert limit.value <= 52, "not while it is not used"
    for _ in range(10_000):
        limit.good(in_flight=100)
    assert limit.value == 100
    limit.resize(10)
    assert limit.value == 10


@given(st.integers(1, 400), st.integers(0, 30))
def test_a_limit_in_use_comes_back_however_far_it_was_cut(maximum: int, cuts: int) -> None:
    limit = Limit(maximum)
    for cut in range(cuts):
        limit.overloaded(sent_at=2.0 * cut, now=2.0 * cut + 1)
    for _ in range(2 * STEPS + 2):
        for _ in range(limit.value):
            limit.good(in_flight=limit.value - 1)
    assert limit.value == maximum


@given(
    st.lists(
        st.tuples(st.sampled_from(["good", "over", "restart", "double"]), st.integers(0, 99)), max_size=200
    )
)
def test_the_limit_stays_between_one_and_its_maximum(events: list[tuple[str, int]]) -> None:
    limit = Limit(40)
    for now, (event, number) in enumerate(events):
        match event:
            case "good":
                limit.good(number)
            case "over":
                limit.overloaded(float(number), float(now))
            case "restart":
                limit.restart(1)
            case _:
                limit.double(limit.maximum)
        assert 1 <= limit.value <= 40
