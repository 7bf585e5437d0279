"""Model servers and settings that say anything at all: a call ends in an outcome, a question in an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
import uvloop
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from schemas.settings import Pool
from streams.core.judge import Outcome, Reply, Unreachable
from streams.pools import places
from streams.pools.endpoint import Endpoint
from streams.pools.openai import OpenAIClient, retry_after_s
from tests.support.rawserver import Asked, RawServer, answer

SOME = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SECRET = "hunter2secret"

HEADERS = st.sampled_from(
    [
        "X-Request-Id",
        "Retry-After",
        "Date",
        "Content-Type",
        "Content-Encoding",
        "Set-Cookie",
        "Location",
        "Link",
    ]
)
LENGTHS = st.sampled_from(["Content-Length", "Transfer-Encoding", "Connection", "Upgrade"])
VALUES = st.one_of(
    st.binary(max_size=40),
    st.text(max_size=20).map(lambda text: text.encode("utf-8", "replace")),
    st.sampled_from(
        [b"\xff\xfe", b"req-\xff", b"a\x00b", b"x" * 10_000, b"9" * 5_000, b"-1", b"http://[", b" "]
    ),
)


class Talk:
    """A client and a raw server that says what a test sets."""

    def __init__(self, server: RawServer, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self.url = server.url
        self.run = run
        self.says: bytes = answer(200, b"{}")

    def script(self, asked: Asked) -> list[bytes | float]:
        return [self.says]

    def call(self, pool: Pool) -> Outcome:
        """All that is ever asked of a server; the outcome of the call."""

        async def ask() -> Outcome:
            client, endpoint = OpenAIClient(), Endpoint("m", pool)
            try:
                await client.healthy(endpoint)
                await client.load(endpoint)
                await client.key_accepted(endpoint)
                await client.lists_no_models(endpoint)
                return await client.call(endpoint, "/v1/completions", b"{}", timeout_s=20)
            finally:
                await client.close()

        outcome: Outcome = self.run(ask())
        return outcome


@pytest.fixture(scope="module")
def talk() -> Iterator[Talk]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        told: list[Talk] = []
        with RawServer(lambda asked: told[0].script(asked)) as server:
            told.append(Talk(server, runner.run))
            yield told[0]


@SOME
@given(HEADERS, VALUES)
def test_any_value_of_a_header(talk: Talk, name: str, value: bytes) -> None:
    """A call is answered, or not with HTTP; and what is kept of it can be written."""
    head, _, body = answer(200, b"{}").partition(b"\r\n\r\n")
    talk.says = head + b"\r\n" + name.encode() + b": " + value + b"\r\n\r\n" + body
    outcome = talk.call(Pool(base_url=f"{talk.url}/v1"))
    msgspec.msgpack.encode(outcome)
    if isinstance(outcome, Reply) and outcome.request_id is not None:
        assert outcome.request_id.encode("ascii") == value.strip()
        assert len(outcome.request_id) <= 128


@SOME
@given(LENGTHS, VALUES)
def test_any_value_of_a_header_that_frames(talk: Talk, name: str, value: bytes) -> None:
    talk.says = b"HTTP/1.1 200 OK\r\n" + name.encode() + b": " + value + b"\r\n\r\n{}"
    msgspec.msgpack.encode(talk.call(Pool(base_url=f"{talk.url}/v1")))


@SOME
@given(st.binary(max_size=200))
def test_anything_but_http(talk: Talk, said: bytes) -> None:
    talk.says = said
    msgspec.msgpack.encode(talk.call(Pool(base_url=f"{talk.url}/v1")))


@given(st.text(), st.text())
def test_any_retry_after(value: str, date: str) -> None:
    wait_s = retry_after_s(value, date, 1_795_953_600.0)
    assert wait_s is None or 0 <= wait_s <= 3_600


KEYS = st.one_of(
    st.none(),
    st.text(max_size=20),
    st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20),
)
URLS = st.one_of(
    st.text(max_size=30),
    st.text(max_size=30).map(lambda rest: "http://" + rest),
    st.text(st.sampled_from("ab1.-_:@/[]%?#\\ \u00fc\u3002\u2100\u200b"), max_size=90).map(
        "http://{}/v1".format
    ),
)


@given(URLS, KEYS)
@example("http://a..b/v1", None)
def test_any_settings_are_judged(url: str, key: str | None) -> None:
    """The check never raises, and what it says repeats no secret."""
    said = places.fault(f"http://user:{SECRET}@{url}", key)
    assert said is None or SECRET not in said
    assert SECRET not in repr(Pool(base_url=f"http://user:{SECRET}@h:1/{quote(url)}"))
    places.fault(url, key)
    assert isinstance(Pool(base_url=url).address, str)


PATHS = st.one_of(st.just("/v1"), st.text(max_size=12).map(lambda text: "/" + text))
USERS = st.one_of(
    st.just(""),
    st.text(max_size=8).map(lambda text: text + "@"),
    st.text(max_size=8).map(lambda text: quote(text, safe="") + ":p%40ss@"),
)


@SOME
@given(USERS, PATHS, KEYS)
@example("", "/v1", "sk-1\n")
@example("", "/v1", "sk-\u00e9")
@example("user:pass@", "/v1", "sk-1")
@example("a%3Ab:c@", "/v1", None)
@example("\u00fc@", "/v1", None)
@example("", "/v1?x=y", None)
def test_what_the_check_lets_through_can_be_sent(talk: Talk, user: str, path: str, key: str | None) -> None:
    talk.says = answer(200, b"{}")
    url = talk.url.replace("http://", f"http://{user}") + path
    outcome = talk.call(Pool(base_url=url, api_key=key))
    assert isinstance(outcome, Unreachable if places.fault(url.rstrip("/"), key) else Reply), outcome
