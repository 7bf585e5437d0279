"""What an executor of tools may do to us, and what becomes of it: over HTTP, and for all that goes out."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from schemas.settings import Egress as EgressSettings
from schemas.tools import FunctionCall, ToolCall
from streams.core.toolconfig import ToolConfig, WorkflowConfig
from streams.core.toolloop import RunTools
from streams.tools.callback import CallbackFailed, call_back
from streams.tools.egress import (
    MAX_ANSWER_BYTES,
    PER_HOST,
    PER_HOST_AND_ORGANIZATION,
    Egress,
    EgressFailed,
    Places,
)
from streams.tools.failure import ToolFailed
from streams.tools.http import HttpExecutor
from tests.support.certificate import certificate
from tests.support.rawserver import Asked, RawServer, answer, stream
from tests.support.until import SLACK_S

SECRET = "Bearer canary-authorization"
CONTEXT = b'{"canary-context": 1.50}'
CALLS = (
    b'[{"id":"a","type":"function","function":{"name":"f","arguments":"{}"}}, '
    b'{"id":"b","function":{"name":"g","arguments":"x"}}]'
)
TURN = RunTools([ToolCall("a", FunctionCall("f", "{}")), ToolCall("b", FunctionCall("g", "x"))], CALLS, b"{}")
GOOD = {"results": [{"tool_call_id": "b", "content": "B"}, {"tool_call_id": "a", "content": "A"}]}


def config(url: str, timeout_ms: int = 1_000, context: bytes | None = CONTEXT) -> ToolConfig:
    return ToolConfig(
        type="http", url=url, authorization=SECRET, context=context, max_rounds=8, timeout_ms=timeout_ms
    )


@pytest.fixture
async def egress() -> AsyncIterator[Egress]:
    client = Egress(EgressSettings(allow_cidrs=("127.0.0.0/8",), allow_http=True))
    yield client
    await client.close()


def shown(error: BaseException | None) -> str:
    """What a log would show of an exception and of those behind it."""
    texts = []
    while error is not None:
        texts.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n".join(texts)


async def run(egress: Egress, reply: bytes | Callable[[Asked], Iterable[bytes | float]]) -> list[str]:
    script = reply if callable(reply) else lambda asked: [reply]
    with RawServer(script) as server:
        try:
            return await HttpExecutor(egress, config(f"{server.url}/canary-url"), "r0").run(TURN)
        finally:
            assert len(server.asked) <= 1, "an executor is asked once"


async def fails(egress: Egress, reply: bytes | Callable[[Asked], Iterable[bytes | float]]) -> str:
    """The message of the failure, which came in time and says nothing it must not."""
    started = time.monotonic()
    with pytest.raises(ToolFailed) as caught:
        await run(egress, reply)
    assert time.monotonic() - started < SLACK_S
    said = shown(caught.value)
    assert "canary" not in said
    assert "127.0.0.1" not in said
    return str(caught.value)


async def test_calls_go_out_as_written_and_contents_come_back_in_their_order(egress: Egress) -> None:
    with RawServer(lambda asked: [answer(200, json.dumps(GOOD).encode())]) as server:
        executor = HttpExecutor(egress, config(f"{server.url}/a%2Fb?c=%7B"), "r0 é")
        assert await executor.run(TURN) == ["A", "B"]
        (asked,) = server.asked
    assert (asked.method, asked.path) == ("POST", "/a%2Fb?c=%7B")
    assert asked.body == b'{"custom_id":"r0 \xc3\xa9","context":' + CONTEXT + b',"tool_calls":' + CALLS + b"}"
    assert asked.headers["authorization"] == SECRET
    assert asked.headers["content-type"] == "application/json"
    assert asked.headers["accept-encoding"] == "identity"


async def test_no_context_is_null(egress: Egress) -> None:
    with RawServer(lambda asked: [answer(200, json.dumps(GOOD).encode())]) as server:
        await HttpExecutor(egress, config(server.url, context=None), "r0").run(TURN)
        assert server.asked[0].json["context"] is None


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (rb'"\ud800"', "contains half of a surrogate pair"),
        (b"\xff", "is not UTF-8 at byte 1"),
        (b"\xef\xbb\xbf{}", "is not JSON: it begins with a byte order mark"),
        (b"[" * 101 + b"]" * 101, "is nested more than 100 levels deep"),
        (b'{"canary": 1, "canary": 2}', "has a key twice in one object"),
        (b"NaN", "contains NaN, which is not JSON"),
    ],
)
async def test_what_is_wrong_with_the_json_is_said(egress: Egress, said: bytes, why: str) -> None:
    assert f"the tool executor's answer {why}" in await fails(egress, answer(200, said))


@pytest.mark.parametrize("status", [204, 301, 302, 307, 400, 401, 403, 404, 429, 500, 503])
async def test_another_status(egress: Egress, status: int) -> None:
    message = await fails(egress, answer(status, b"{}", Location="https://example.com/", Retry_After="1"))
    assert (str(status) in message) == (status != 204)


@pytest.mark.parametrize(
    "results",
    [
        {},
        [],
        {"results": None},
        {"results": {}},
        {"results": GOOD["results"][:1]},
        {"results": [*GOOD["results"], {"tool_call_id": "c", "content": "C"}]},
        {"results": [*GOOD["results"], GOOD["results"][0]]},
        {"results": [GOOD["results"][0], GOOD["results"][0]]},
        {"results": [GOOD["results"][0], {"tool_call_id": "a", "content": 7}]},
        {"results": [GOOD["results"][0], {"tool_call_id": "a", "content": {}}]},
        {"results": [GOOD["results"][0], {"tool_call_id": "a", "content": None}]},
        {"results": [GOOD["results"][0], {"tool_call_id": "a"}]},
        {"results": [GOOD["results"][0], {"tool_call_id": 1, "content": "A"}]},
        {"results": [GOOD["results"][0], "a"]},
    ],
)
async def test_every_call_is_answered_once_with_text(egress: Egress, results: Any) -> None:
    await fails(egress, answer(200, json.dumps(results).encode()))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<!doctype html><p>hello",
        json.dumps(GOOD).encode()[:-5],
        json.dumps(GOOD).encode() + b"{}",
        b"\xff\xfe",
        b'{"results":[],' + json.dumps(GOOD).encode()[1:],
        b'{"results":' + b"[" * 100_001,
        b'{"x":' + b"[" * 100_001 + b"]" * 100_001 + b',"results":[]}',
    ],
    ids=["empty", "html", "cut off", "two documents", "not UTF-8", "a key twice", "deep", "deep beside"],
)
async def test_what_is_not_the_answer(egress: Egress, body: bytes) -> None:
    await fails(egress, answer(200, body))


@pytest.mark.parametrize("encoding", ["", " ", "identity", "Identity"])
async def test_no_compression_is_no_compression(egress: Egress, encoding: str) -> None:
    whole = answer(200, json.dumps(GOOD).encode(), Content_Encoding=encoding)
    assert await run(egress, whole) == ["A", "B"]


async def test_the_body_of_an_error_is_not_read(egress: Egress) -> None:
    assert "503" in await fails(egress, answer(503, b"x", Content_Encoding="gzip"))


class Room:
    """Room for so much; what does not fit waits for ever, or until `more`."""

    def __init__(self, size: int) -> None:
        self.free = size
        self.more = asyncio.Event()

    def take(self, size: int) -> bool:
        if size > self.free:
            return False
        self.free -= size
        return True

    async def wait(self, size: int) -> None:
        await self.more.wait()
        self.free -= size

    def give(self, size: int) -> None:
        self.free += size


async def test_an_answer_is_read_as_far_as_there_is_room(egress: Egress) -> None:
    good = json.dumps(GOOD).encode()
    whole = answer(200, good)
    with RawServer(lambda asked: [whole[:-10], 0.1, whole[-10:]]) as server:
        room = Room(10)
        running = asyncio.create_task(HttpExecutor(egress, config(server.url, 300), "r0", room).run(TURN))
        await asyncio.sleep(0.6)  # longer than the deadline, which waits as well
        assert not running.done()
        room.more.set()
        assert await running == ["A", "B"]
    assert room.free == 10 - len(good)


async def test_what_a_failed_answer_took_is_given_back(egress: Egress) -> None:
    room = Room(1_000_000)
    with RawServer(lambda asked: [answer(200, b"x" * 1_000)[:-1]]) as server, pytest.raises(ToolFailed):
        await HttpExecutor(egress, config(server.url), "r0", room).run(TURN)
    assert room.free == 1_000_000


async def test_unknown_members_do_not_matter(egress: Egress) -> None:
    padded = {"version": 2, "results": [each | {"extra": [1]} for each in GOOD["results"]]}
    assert await run(egress, answer(200, json.dumps(padded).encode())) == ["A", "B"]


async def test_compressed_answers_are_not_opened(egress: Egress) -> None:
    bomb = gzip.compress(b"0" * 50_000_000)
    assert "compressed" in await fails(egress, answer(200, bomb, Content_Encoding="gzip"))


async def test_an_answer_has_a_size(egress: Egress) -> None:
    fits = {"results": [GOOD["results"][0], {"tool_call_id": "a", "content": "x" * (MAX_ANSWER_BYTES - 500)}]}
    assert len((await run(egress, answer(200, json.dumps(fits).encode())))[0]) == MAX_ANSWER_BYTES - 500
    assert "over" in await fails(egress, answer(200, b" " * (MAX_ANSWER_BYTES + 1)))

    def endless(asked: Asked) -> Iterable[bytes]:
        yield stream(media_type="application/json")
        for _ in range(1_000):
            yield b" " * 65_536

    assert "over" in await fails(egress, endless)


@pytest.mark.parametrize(
    "script",
    [
        lambda asked: [60.0],
        lambda asked: [b"HTTP/1.1 200 OK\r\n", 60.0],
        lambda asked: [x for byte in answer(200, json.dumps(GOOD).encode()) for x in (bytes([byte]), 0.05)],
        lambda asked: [answer(200, b"{}")[:-1], 60.0],
    ],
    ids=["silent", "headers only", "one byte at a time", "one byte short"],
)
async def test_one_deadline_for_all_of_it(egress: Egress, script: Any) -> None:
    assert "within 1 s" in await fails(egress, script)


@pytest.mark.parametrize(
    "script",
    [
        lambda asked: [],
        lambda asked: [b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{"],
        lambda asked: [b"SSH-2.0-OpenSSH_9.6\r\n"],
        lambda asked: [b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"],
        lambda asked: [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"],
        lambda asked: [b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n"],
        lambda asked: [b"HTTP/1.1 200 OK\r\nContent-Encoding: nonsense\r\nContent-Length: 2\r\n\r\n{}"],
        lambda asked: [b"HTTP/1.1 200 OK\r\nSet-Cookie: \xff\xfe=\r\nContent-Length: 2\r\n\r\n{}"],
        lambda asked: [b"HTTP/1.1 999999 \xff\r\n\r\n"],
        lambda asked: [b"\x00" * 1_000],
    ],
)
async def test_broken_connections_and_broken_http(egress: Egress, script: Any) -> None:
    await fails(egress, script)


async def test_nobody_there(egress: Egress) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/"
        with pytest.raises(ToolFailed, match="no connection could be opened"):
            await HttpExecutor(egress, config(url), "r0").run(TURN)
    with pytest.raises(ToolFailed, match="cannot be resolved"):
        await HttpExecutor(egress, config("http://nowhere.invalid/"), "r0").run(TURN)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.1",
        "2130706433",
        "0x7f.1",
        "0177.0.0.1",
        "localhost",
        "LOCALHOST",
        "[::ffff:127.0.0.1]",
        "[::1]",
        "0.0.0.0",
        "[::]",
        "169.254.169.254",
        "[2002:7f00:1::]",
        "[64:ff9b::7f00:1]",
    ],
)
async def test_no_connection_to_what_is_not_public(host: str) -> None:
    """The listener sees nothing, however the address is spelled."""
    with RawServer(lambda asked: [answer(200, b"{}")]) as server:
        client = Egress(EgressSettings(allow_http=True))
        port = server.url.rpartition(":")[2]
        try:
            with pytest.raises(EgressFailed):
                await client.post(f"http://{host}:{port}/", b"{}", headers={}, timeout_s=2)
        finally:
            await client.close()
        assert server.connections == 0


async def test_a_name_is_judged_by_what_it_resolves_to_when_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Public when it was looked at first, ours when the connection is made."""
    addresses = iter(["93.184.215.14", "127.0.0.1", "10.0.0.1"])
    asked: list[str] = []

    def resolve(host: str, port: int, *_: Any) -> list[Any]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(addresses), port))]

    with RawServer(lambda asked: [answer(200, b"{}")]) as server:
        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        client = Egress(EgressSettings(allow_http=True))
        port = server.url.rpartition(":")[2]
        try:
            assert socket.getaddrinfo("rebind.example", 80)[0][4][0] == "93.184.215.14"
            for _ in range(2):
                with pytest.raises(EgressFailed, match="no public address"):
                    await client.post(f"http://rebind.example:{port}/", b"", headers={}, timeout_s=2)
        finally:
            await client.close()
        assert server.connections == 0
    assert "rebind.example" in asked


async def test_only_https_unless_allowed() -> None:
    client = Egress(EgressSettings(allow_cidrs=("127.0.0.0/8",)))
    with RawServer(lambda asked: [answer(200, b"{}")]) as server:
        with pytest.raises(EgressFailed, match="https"):
            await client.post(server.url, b"{}", headers={}, timeout_s=1)
        with pytest.raises(EgressFailed):
            await client.post(server.url.replace("http", "https"), b"{}", headers={}, timeout_s=1)
        assert not server.asked
    await client.close()


async def test_no_proxy_and_no_credentials_of_this_machine(
    egress: Egress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert await run(egress, answer(200, json.dumps(GOOD).encode(), Set_Cookie="a=b")) == ["A", "B"]

    def no_cookie(asked: Asked) -> Iterable[bytes]:
        assert "cookie" not in asked.headers
        yield answer(200, json.dumps(GOOD).encode())

    assert await run(egress, no_cookie) == ["A", "B"]


async def test_places_are_bounded_and_given_in_turn() -> None:
    places = Places(2)
    inside, most, order = 0, 0, []

    async def hold(number: int) -> None:
        nonlocal inside, most
        async with places.of("host"):
            inside += 1
            most = max(most, inside)
            order.append(number)
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(hold(number) for number in range(10)))
    assert (most, order) == (2, list(range(10)))
    async with places.of("other"), places.of("host"):
        pass
    assert not places._known


async def test_one_organization_leaves_places_at_a_host_to_others(egress: Egress) -> None:
    held = 0
    leave, all_it_may_have = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        nonlocal held
        async with egress.place("http://shared.example/slow", "org_many"):
            held += 1
            if held == PER_HOST_AND_ORGANIZATION:
                all_it_may_have.set()
            await leave.wait()

    async with asyncio.TaskGroup() as group:
        for _ in range(PER_HOST + 10):
            group.create_task(hold())
        async with asyncio.timeout(10):
            await all_it_may_have.wait()
            async with egress.place("http://shared.example/quick", "org_one"):
                assert held == PER_HOST_AND_ORGANIZATION
        leave.set()
    assert held == PER_HOST + 10


async def test_who_is_let_past_needs_no_place() -> None:
    places, let_past = Places(1), asyncio.Event()
    entered: list[str] = []

    async def enter(name: str) -> None:
        async with places.of("host", let_past):
            entered.append(name)

    async with places.of("host"):
        waits, gone = asyncio.create_task(enter("waits")), asyncio.create_task(enter("gone"))
        await asyncio.sleep(0.01)
        gone.cancel()
        await asyncio.wait([gone])
        assert not entered
        let_past.set()
        await waits
        await enter("later")
        assert entered == ["waits", "later"]
    assert not places._known


@pytest.mark.parametrize(
    ("script", "again"),
    [
        (lambda asked: [answer(500)], True),
        (lambda asked: [answer(503)], True),
        (lambda asked: [], True),
        (lambda asked: [60.0], True),
        (lambda asked: [answer(404)], False),
        (lambda asked: [answer(302, Location="/")], False),
        (lambda asked: [answer(200, b"{}", Content_Encoding="gzip")], False),
        (lambda asked: [answer(200, b"x" * (MAX_ANSWER_BYTES + 1))], False),
        (lambda asked: [answer(503, b"{}", Content_Encoding="gzip")], True),
    ],
)
async def test_a_callback_is_called_again_when_it_was_not_there(
    egress: Egress, script: Any, again: bool
) -> None:
    with RawServer(script) as server:
        flow = WorkflowConfig(
            url=f"{server.url}/canary",
            authorization=SECRET,
            context=CONTEXT,
            timeout_ms=300,
            max_steps=1,
            max_requests=1,
            max_tokens=1,
        )
        with pytest.raises(CallbackFailed) as caught:
            await call_back(egress, flow, b"{}")
        assert caught.value.again is again
        assert "canary" not in str(caught.value)


async def test_tls_names_are_checked_although_addresses_are_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A certificate for the name is accepted when its issuer is trusted, and no other."""
    authority = certificate(tmp_path / "pair.pem", "tools.example")
    server_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_tls.load_cert_chain(tmp_path / "pair.pem")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer(200, b"{}"))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server_tls)
    port = server.sockets[0].getsockname()[1]
    where = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: where)
    allowed = EgressSettings(allow_cidrs=("127.0.0.0/8",))

    async def fetch(host: str, trusted: Path | None) -> int:
        if trusted is not None:
            monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
        client = Egress(allowed)
        try:
            return (await client.post(f"https://{host}:{port}/", b"", headers={}, timeout_s=5))[0]
        finally:
            await client.close()

    with pytest.raises(EgressFailed, match="TLS"):
        await fetch("tools.example", None)
    (tmp_path / "authority.pem").write_bytes(authority)
    assert await fetch("tools.example", tmp_path / "authority.pem") == 200
    with pytest.raises(EgressFailed, match="TLS"):
        await fetch("other.example", tmp_path / "authority.pem")
    server.close()
    await server.wait_closed()
