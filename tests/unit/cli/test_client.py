"""Retries, resumed downloads, and errors in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from services.cli.client import Client, Exit, Refused, Trouble, Unreachable
from services.embedded.ports import free_port
from tests.unit.cli.standin import KEY, StandIn


class Clock:
    """Sleeps that take no time, and their sum."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def client(server: StandIn, clock: Clock) -> Iterator[Client]:
    with Client(server.base_url, KEY, sleep=clock.sleep) as opened:
        yield opened


def test_an_error_is_a_sentence_with_code_and_request_id(client: Client) -> None:
    with pytest.raises(Refused) as refused:
        client.get("/batches/nope")
    assert str(refused.value) == "There is no such thing. [not_found, request req_42]"
    assert (refused.value.status, refused.value.exit_status) == (404, Exit.USAGE)


def test_a_wrong_key_has_its_own_exit_status(server: StandIn) -> None:
    with Client(server.base_url, "or_wrong") as client, pytest.raises(Refused) as refused:
        client.get("/batches")
    assert refused.value.exit_status is Exit.AUTHENTICATION


def test_reads_are_repeated_and_retry_after_is_kept(server: StandIn, client: Client, clock: Clock) -> None:
    server.trouble.extend(
        [
            ("GET", "/batches", (429, {"retry-after": "3"})),
            ("GET", "/batches", (503, {})),
            ("GET", "/batches", "lost"),
        ]
    )
    assert client.get("/batches")["data"] == []
    assert clock.slept[0] == 3
    assert 0.25 <= clock.slept[1] <= 0.5
    assert server.count("GET", "/batches") == 4


def test_patience_ends(server: StandIn, client: Client, clock: Clock) -> None:
    server.trouble.extend([("GET", "/batches", (503, {"retry-after": "4"}))] * 4)
    with pytest.raises(Refused, match="Trouble 503") as refused:
        client.get("/batches")
    assert refused.value.exit_status is Exit.NETWORK
    assert sum(clock.slept) == pytest.approx(10)
    client.get("/models")
    server.trouble.extend([("GET", "/batches", (503, {"retry-after": "30"}))] * 4)
    assert client.get("/batches")["data"] == []
    assert sum(clock.slept) == pytest.approx(130)


def test_other_errors_are_not_repeated(server: StandIn, client: Client, clock: Clock) -> None:
    server.trouble.append(("GET", "/batches", (500, {})))
    with pytest.raises(Refused) as refused:
        client.get("/batches")
    assert (refused.value.exit_status, clock.slept) == (Exit.NETWORK, [])


@pytest.mark.parametrize(
    ("fault", "said"),
    [(httpx.ReadError(""), "the connection broke"), (httpx.ReadTimeout(""), "no answer in time")],
)
def test_a_fault_without_a_text_has_words_all_the_same(
    client: Client, monkeypatch: pytest.MonkeyPatch, fault: httpx.TransportError, said: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise fault

    monkeypatch.setattr(httpx.Client, "request", fail)
    with pytest.raises(Unreachable, match=said):
        client.delete("/files/a")


def test_a_server_that_is_not_there(clock: Clock) -> None:
    client = Client(f"http://127.0.0.1:{free_port()}/v1", KEY, sleep=clock.sleep)
    with client, pytest.raises(Unreachable, match="cannot be reached") as gone:
        client.delete("/files/a")
    assert gone.value.exit_status is Exit.NETWORK
    assert len(clock.slept) > 3


def test_a_lost_answer_is_asked_for_again_only_where_that_is_safe(
    server: StandIn, client: Client, tmp_path: Path
) -> None:
    server.files["file-a"] = b"x"
    body = {"input_file_id": "file-a", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    server.trouble.append(("POST", "/batches", "lost"))
    assert client.post("/batches", body, idempotency_key="k")["id"] == "batch_0"
    assert server.created == ["batch_0"]
    server.trouble.append(("POST", "/batches", "lost"))
    with pytest.raises(Unreachable, match="did not answer"):
        client.post("/batches", body)
    server.trouble.append(("DELETE", "/files", "lost"))
    with pytest.raises(Unreachable, match="did not answer"):
        client.delete("/files/file-a")
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"y" * 200_000)
    sent: list[int] = []
    server.trouble.append(("POST", "/files", "lost"))
    stored = client.upload(path, sent.append)
    assert server.files[stored["id"]] == b"y" * 200_000
    assert max(sent) == 200_000


@pytest.mark.parametrize("resume", [True, False])
def test_a_broken_download_goes_on(server: StandIn, client: Client, resume: bool) -> None:
    data = bytes(range(256)) * 2000
    server.files["file-a"] = data
    server.trouble.extend([("GET", "/files/file-a/content", f"cut:{cut}") for cut in (0, 200_000, 100_000)])
    got = bytearray()
    seen: list[tuple[int, int]] = []
    if not resume:
        client._http.headers["If-Range"] = '"other"'
    size = client.download("file-a", got.extend, lambda done, of: seen.append((done, of)))
    assert bytes(got) == data
    assert size == len(data)
    assert seen[-1] == (len(data), len(data))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_answers_that_are_not_ours(server: StandIn, client: Client) -> None:
    server.files["file-a"] = b"[1]"
    with pytest.raises(Trouble, match="JSON object"):
        client.get("/files/file-a/content")
