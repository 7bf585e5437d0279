"""The MCP executor against servers of the official SDK, of two majors, and against what no SDK does."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest

from schemas.settings import Egress as EgressSettings
from schemas.tools import FunctionCall, ToolCall
from streams.core.toolconfig import ToolConfig
from streams.core.toolloop import RunTools
from streams.tools.egress import MAX_ANSWER_BYTES, Egress
from streams.tools.failure import ToolFailed
from streams.tools.mcp import AFTER_RESPONSE_S, NOT_ARGUMENTS, McpExecutor
from tests.support.mcp_process import McpServer
from tests.support.rawserver import Asked, RawServer, answer, event, stream
from tests.support.until import SLACK_S

SECRET = "Bearer canary-authorization"
Pieces = Iterable[bytes | float]


def config(url: str, timeout_ms: int = 1_000, context: bytes | None = None) -> ToolConfig:
    return ToolConfig(
        type="mcp", url=url, authorization=SECRET, context=context, max_rounds=8, timeout_ms=timeout_ms
    )


def turn(*calls: tuple[str, str]) -> RunTools:
    listed = [ToolCall(f"call_{i}", FunctionCall(name, args)) for i, (name, args) in enumerate(calls)]
    return RunTools(listed, b"", b"")


@pytest.fixture
async def egress() -> AsyncIterator[Egress]:
    client = Egress(EgressSettings(allow_cidrs=("127.0.0.0/8",), allow_http=True))
    yield client
    await client.close()


# ---- servers of the SDK ----


@pytest.fixture(scope="module")
def sdk_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., McpServer]]:
    """Gives the server of a major version of the SDK with some options: one for all tests that want it."""
    with ExitStack() as running:

        @cache
        def server(sdk: int, *options: str) -> McpServer:
            return running.enter_context(McpServer(tmp_path_factory.mktemp("mcp"), sdk, *options))

        yield server


@pytest.mark.parametrize(
    "options",
    [(), ("json",), ("stateless",), ("stateless", "json")],
    ids=["sessions", "json", "stateless", "stateless-json"],
)
@pytest.mark.parametrize("sdk", [1, 2])
async def test_sdk_servers_are_spoken_to(
    egress: Egress, sdk_server: Callable[..., McpServer], sdk: int, options: tuple[str, ...]
) -> None:
    executor = McpExecutor(egress, config(sdk_server(sdk, *options).url, 10_000))
    first = await executor.run(turn(("lookup", '{"city":"Rome"}'), ("lookup", ""), ("lookup", "[1]")))
    assert first == ["It is 18 degrees in Rome.", "It is 18 degrees in nowhere.", NOT_ARGUMENTS]
    second = await executor.run(
        turn(("fail", '{"reason":"no such city"}'), ("parts", "{}"), ("absent", "{}"))
    )
    assert "no such city" in second[0]
    assert second[1] == "first, second"
    assert "absent" in second[2]
    assert (executor._session is None) == ("stateless" in options)
    await executor.close()


@pytest.mark.parametrize("sdk", [1, 2])
async def test_a_server_that_talks_before_it_answers(
    egress: Egress, sdk_server: Callable[..., McpServer], sdk: int
) -> None:
    executor = McpExecutor(egress, config(sdk_server(sdk).url, 10_000))
    assert await executor.run(turn(("talk", "{}"))) == ["asked and was told: Method not found"]
    await executor.close()


@pytest.mark.parametrize("sdk", [1, 2])
async def test_a_session_that_the_server_forgot(
    egress: Egress, sdk_server: Callable[..., McpServer], sdk: int
) -> None:
    server = sdk_server(sdk)
    executor = McpExecutor(egress, config(server.url, 10_000))
    await executor.run(turn(("lookup", "{}")))
    before = executor._session
    await asyncio.to_thread(server.stop)
    await asyncio.to_thread(server.start)
    assert await executor.run(turn(("lookup", '{"city":"Rome"}'))) == ["It is 18 degrees in Rome."]
    assert executor._session != before
    await executor.close()


async def test_a_session_is_closed_at_the_end(egress: Egress, sdk_server: Callable[..., McpServer]) -> None:
    server = sdk_server(2)
    executor = McpExecutor(egress, config(server.url, 10_000))
    await executor.run(turn(("lookup", "{}")))
    await executor.close()
    session = executor._session
    assert session is not None
    headers = {"Mcp-Session-Id": session, "Accept": "application/json, text/event-stream"}
    status, _ = await egress.post(
        server.url,
        b'{"jsonrpc":"2.0","id":1,"method":"ping"}',
        headers=headers | {"Content-Type": "application/json"},
        timeout_s=5,
    )
    assert status == 404


async def test_a_slow_tool_is_cut_off(egress: Egress, sdk_server: Callable[..., McpServer]) -> None:
    executor = McpExecutor(egress, config(sdk_server(2).url, 1_000))
    await executor.run(turn(("lookup", "{}")))
    started = time.monotonic()
    with pytest.raises(ToolFailed, match="within 1 s"):
        await executor.run(turn(("slow", '{"seconds":60}')))
    assert time.monotonic() - started < SLACK_S


# ---- what no SDK does ----


class Server:
    """A whole MCP server by default; `says` replaces what it answers to a method."""

    def __init__(self, **says: Callable[[Asked], Pieces] | bytes) -> None:
        self._says = {name.replace("_", "/"): script for name, script in says.items()}
        self.methods: list[str] = []

    def __call__(self, asked: Asked) -> Pieces:
        method = asked.json["method"] if asked.body and "method" in asked.json else asked.method
        self.methods.append(method)
        script = self._says.get(method)
        if isinstance(script, bytes):
            return [script]
        if script is not None:
            return script(asked)
        match method:
            case "initialize":
                return [initialized(asked)]
            case "tools/call":
                return [called(asked)]
        return [answer(202)]


def reply(asked: Asked, result: Any = None, **fields: Any) -> bytes:
    body = {"jsonrpc": "2.0", "id": asked.json.get("id"), "result": result} | fields
    return json.dumps(body).encode()


def initialized(asked: Asked, version: Any = "2025-11-25", **headers: str) -> bytes:
    result = {"capabilities": {}, "serverInfo": {"name": "x", "version": "1"}}
    if version is not None:
        result["protocolVersion"] = version
    return answer(200, reply(asked, result), **headers)


def text(content: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": content}]}


def called(asked: Asked) -> bytes:
    return answer(200, reply(asked, text(json.dumps(asked.json["params"]))))


async def run(
    egress: Egress, server: Server, *calls: tuple[str, str], **fields: Any
) -> tuple[list[str], RawServer]:
    with RawServer(server) as raw:
        executor = McpExecutor(egress, config(f"{raw.url}/canary", **fields))
        contents = await executor.run(turn(*(calls or [("f", "{}")])))
        await executor.close()
        return contents, raw


async def fails(egress: Egress, server: Server, **fields: Any) -> str:
    started = time.monotonic()
    with pytest.raises(ToolFailed) as caught:
        await run(egress, server, **fields)
    assert time.monotonic() - started < SLACK_S
    said = f"{caught.value} {caught.value.__cause__}"
    assert "canary" not in said
    assert "127.0.0.1" not in said
    return str(caught.value)


async def test_what_is_sent(egress: Egress) -> None:
    server = Server(initialize=lambda asked: [initialized(asked, "2025-06-18", Mcp_Session_Id="s-1")])
    contents, raw = await run(
        egress,
        server,
        ("f", '{"a" : 1.50, "_context": "theirs"}'),
        ("g é", ""),
        context=b'{"contract": "c-7"}',
    )
    assert server.methods == ["initialize", "notifications/initialized", "tools/call", "tools/call", "DELETE"]
    first, second, third, fourth, last = raw.asked
    assert first.json["params"]["protocolVersion"] == "2025-11-25"
    assert first.json["params"]["clientInfo"]["name"] == "openrelay-batch-worker"
    assert "mcp-session-id" not in first.headers
    assert "id" not in second.json
    assert third.body.endswith(
        b'"params":{"name":"f","arguments":{"a" : 1.50, "_context": {"contract": "c-7"}}}}'
    )
    assert fourth.json["params"] == {"name": "g é", "arguments": {"_context": {"contract": "c-7"}}}
    assert len({first.json["id"], third.json["id"], fourth.json["id"]}) == 3
    for asked in raw.asked:
        assert asked.headers["authorization"] == SECRET
    for asked in (second, third, fourth, last):
        assert asked.headers["mcp-session-id"] == "s-1"
        assert asked.headers["mcp-protocol-version"] == "2025-06-18"
    for asked in (first, second, third, fourth):
        assert asked.headers["accept"] == "application/json, text/event-stream"
    assert [json.loads(each)["name"] for each in contents] == ["f", "g é"]


async def test_no_context_no_argument(egress: Egress) -> None:
    contents, _ = await run(egress, Server(), ("f", '{"a":1}'))
    assert json.loads(contents[0])["arguments"] == {"a": 1}


async def test_one_handshake_for_all_turns(egress: Egress) -> None:
    server = Server()
    with RawServer(server) as raw:
        executor = McpExecutor(egress, config(raw.url))
        for _ in range(3):
            await executor.run(turn(("f", "{}")))
        await executor.close()
    assert server.methods == ["initialize", "notifications/initialized", *["tools/call"] * 3]


@pytest.mark.parametrize(
    "arguments", ["[]", "1", "null", '"{}"', '{"a":', "{} {}", "nothing", "[" * 100_001, " "]
)
async def test_arguments_that_are_no_object_are_told_to_the_model(egress: Egress, arguments: str) -> None:
    server = Server()
    contents, _ = await run(egress, server, ("f", arguments))
    assert contents == [NOT_ARGUMENTS]
    assert "tools/call" not in server.methods


@pytest.mark.parametrize("status", [404, 405])
async def test_without_a_handshake_tools_are_called_directly(egress: Egress, status: int) -> None:
    server = Server(initialize=answer(status, b"no such thing", "text/plain"))
    contents, raw = await run(egress, server)
    assert len(contents) == 1
    assert server.methods == ["initialize", "tools/call"]
    assert not {"mcp-session-id", "mcp-protocol-version"} & raw.asked[1].headers.keys()


@pytest.mark.parametrize("status", [301, 302, 400, 401, 403, 406, 429, 500, 503])
async def test_another_status_of_the_handshake(egress: Egress, status: int) -> None:
    server = Server(initialize=answer(status, b"{}", Location="/", Mcp_Session_Id="s"))
    assert str(status) in await fails(egress, server)
    assert server.methods == ["initialize"]


@pytest.mark.parametrize(
    "script",
    [
        lambda asked: [answer(200)],
        lambda asked: [answer(202)],
        lambda asked: [answer(200, b"<p>hello", "text/html")],
        lambda asked: [answer(200, b"{}")],
        lambda asked: [answer(200, b"[]")],
        lambda asked: [answer(200, reply(asked, [])[:-3])],
        lambda asked: [answer(200, reply(asked, None, error={"code": -32603, "message": "canary"}))],
        lambda asked: [answer(200, reply(asked, [1]))],
        lambda asked: [answer(200, reply(asked, {}, id=77))],
        lambda asked: [answer(200, reply(asked, {}, id="1"))],
        lambda asked: [initialized(asked, "2024-11-05")],
        lambda asked: [initialized(asked, "tomorrow")],
        lambda asked: [initialized(asked, "")],
        lambda asked: [initialized(asked, 7)],
        lambda asked: [initialized(asked, Mcp_Session_Id="a b")],
        lambda asked: [initialized(asked, Mcp_Session_Id="x" * 5_000)],
        lambda asked: [initialized(asked, Mcp_Session_Id="sé")],
        lambda asked: [stream()],
        lambda asked: [stream(b"not json")],
        lambda asked: [60.0],
        lambda asked: [],
    ],
)
async def test_a_handshake_that_is_none(egress: Egress, script: Any) -> None:
    server = Server(initialize=script)
    await fails(egress, server)
    assert server.methods == ["initialize"]


@pytest.mark.parametrize("version", ["2025-03-26", "2025-06-18", "2025-11-25", None])
async def test_revisions_that_are_spoken(egress: Egress, version: str | None) -> None:
    _, raw = await run(egress, Server(initialize=lambda asked: [initialized(asked, version)]))
    assert raw.asked[2].headers["mcp-protocol-version"] == (version or "2025-03-26")


def refusing(status: int, code: int) -> Callable[[Asked], Pieces]:
    def refuse(asked: Asked) -> Pieces:
        error = {"code": code, "message": "Unsupported", "data": {"supported": ["2026-07-28"]}}
        return [answer(status, reply(asked, error=error).replace(b'"result": null, ', b""))]

    return refuse


@pytest.mark.parametrize(
    "says",
    [
        {"initialize": refusing(200, -32022)},
        {"initialize": refusing(400, -32022)},
        {"initialize": refusing(200, -32601)},
        {"initialize": refusing(404, -32601), "tools_call": refusing(400, -32020)},
        {"initialize": refusing(405, -32601), "tools_call": refusing(400, -32022)},
        {"initialize": lambda asked: [initialized(asked, "2026-07-28")]},
    ],
)
async def test_a_server_of_a_later_revision_only_is_named_as_such(egress: Egress, says: Any) -> None:
    assert "later than 2025-11-25" in await fails(egress, Server(**says))


async def test_a_later_revision_is_named(egress: Egress) -> None:
    server = Server(initialize=lambda asked: [initialized(asked, "2026-07-28")])
    assert "2026-07-28" in await fails(egress, server)


@pytest.mark.parametrize(
    "refusal",
    [
        answer(404, b"compressed", Content_Encoding="gzip"),
        answer(405, b"x" * (MAX_ANSWER_BYTES + 1)),
        answer(404, stream(b"not json"), "text/event-stream"),
    ],
    ids=["compressed", "large", "events"],
)
async def test_the_body_of_a_handshake_that_is_not_there_does_not_matter(
    egress: Egress, refusal: bytes
) -> None:
    server = Server(initialize=refusal)
    await run(egress, server)
    assert server.methods == ["initialize", "tools/call"]


async def test_the_notification_may_not_be_refused(egress: Egress) -> None:
    assert "401" in await fails(egress, Server(notifications_initialized=answer(401)))


@pytest.mark.parametrize(
    "script",
    [
        *(answer(status, b"{}", Location="/") for status in (301, 400, 401, 403, 404, 405, 500)),
        lambda asked: [answer(202)],
        lambda asked: [answer(204)],
        lambda asked: [answer(200, b"null")],
        lambda asked: [answer(200, reply(asked, None, error={"code": -32000, "message": "x"}))],
        lambda asked: [answer(200, reply(asked, {"content": "text"}))],
        lambda asked: [answer(200, reply(asked, {"content": [1]}))],
        lambda asked: [answer(200, reply(asked, {"content": [{"type": "text", "text": 1}]}))],
        lambda asked: [answer(200, reply(asked, text("x"), id=99))],
        lambda asked: [answer(200, reply(asked, text("x")), Content_Encoding="gzip")],
        lambda asked: [answer(200, reply(asked, text("x" * MAX_ANSWER_BYTES)))],
        lambda asked: [answer(200, b'{"id":2,"result":' + b"[" * 100_001)],
        lambda asked: [stream(reply(asked, text("x"), id=99))],
        lambda asked: [stream(b'{"jsonrpc":"2.0","method":"notifications/message"}')],
        lambda asked: [stream() + b"data: " + reply(asked, text("x")) + b"\n"],
        lambda asked: [stream(reply(asked, text("x"), id=99)), 60.0],
        lambda asked: [stream(), *([event(b'{"jsonrpc":"2.0","method":"notifications/x"}'), 0.1] * 600)],
        lambda asked: [stream(), *([b": still here\n\n", 0.1] * 600)],
        lambda asked: [stream(), *([b"x" * 65_536] * 200)],
        lambda asked: [x for byte in answer(200, reply(asked, text("x"))) for x in (bytes([byte]), 0.05)],
        lambda asked: [answer(200, reply(asked, text("x")))[:-2]],
        lambda asked: [answer(200, b'{"id":2,"result":{},"result":' + json.dumps(text("x")).encode() + b"}")],
    ],
)
async def test_a_call_that_is_not_answered(egress: Egress, script: Any) -> None:
    await fails(egress, Server(tools_call=script))


async def test_errors_of_tools_are_answers(egress: Egress) -> None:
    result = text("it broke") | {"isError": True}
    contents, _ = await run(egress, Server(tools_call=lambda asked: [answer(200, reply(asked, result))]))
    assert contents == ["it broke"]


@pytest.mark.parametrize(
    ("result", "content"),
    [
        ({}, ""),
        ({"content": []}, ""),
        ({"content": [{"type": "image", "data": "aGk=", "mimeType": "image/png"}]}, ""),
        (
            {"content": [{"type": "text", "text": "a\n"}, {"type": "new"}, {"type": "text", "text": "b"}]},
            "a\nb",
        ),
        ({"content": [{"type": "text", "text": "a"}], "structuredContent": {"b": 1}, "_meta": {}}, "a"),
    ],
)
async def test_only_texts_reach_the_model(egress: Egress, result: Any, content: str) -> None:
    contents, _ = await run(egress, Server(tools_call=lambda asked: [answer(200, reply(asked, result))]))
    assert contents == [content]


async def test_the_last_response_of_a_stream_counts_in_whatever_pieces_it_comes(egress: Egress) -> None:
    def talk(asked: Asked) -> Pieces:
        whole = (
            b"\xef\xbb\xbf: hello\r\nid: 1\r\ndata:\r\n\r\n"
            b'event: ping\ndata: not for us\n\ndata: {"jsonrpc":"2.0","method":"notifications/message"}\r\r'
            + event(reply(asked, text("first"), id=99))
            + b'data: {"jsonrpc": "2.0",\ndata:  "id": %d,\r\ndata: ' % asked.json["id"]
            + b'"result": {"content": [{"type": "text", "text": "last"}]}}\n\n'
            + b'data: {"jsonrpc":"2.0","id":7'
        )
        return [stream(media_type="Text/Event-Stream; charset=utf-8")] + [bytes([byte]) for byte in whole]

    contents, _ = await run(egress, Server(tools_call=talk))
    assert contents == ["last"]


@pytest.mark.parametrize("end", ["\r\r", "\r\n\r", "\n\r", "\n\n", "\r\n\r\n"])
async def test_a_stream_may_end_with_any_line_end(egress: Egress, end: str) -> None:
    def talk(asked: Asked) -> Pieces:
        return [stream(), b"data: " + reply(asked, text("whole")) + end.encode()]

    contents, _ = await run(egress, Server(tools_call=talk))
    assert contents == ["whole"]


@pytest.mark.parametrize("end", [[60.0], [event(b'{"jsonrpc":"2.0","method":"notifications/x"}'), 0.1] * 600])
async def test_a_response_counts_although_its_stream_stays_open(egress: Egress, end: list[Any]) -> None:
    server = Server(tools_call=lambda asked: [stream(reply(asked, text("here"))), *end])
    started = time.monotonic()
    contents, _ = await run(egress, server, timeout_ms=30_000)
    assert contents == ["here"]
    assert time.monotonic() - started < AFTER_RESPONSE_S + SLACK_S


async def test_a_response_counts_although_its_stream_breaks(egress: Egress) -> None:
    def broken(asked: Asked) -> Pieces:
        said = event(reply(asked, text("here")))
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        return [head + b"%x\r\n" % len(said) + said + b"\r\nff\r\ncut"]

    contents, _ = await run(egress, Server(tools_call=broken))
    assert contents == ["here"]


async def test_a_response_counts_whatever_its_stream_says_behind_it(egress: Egress) -> None:
    server = Server(tools_call=lambda asked: [stream(reply(asked, text("here"))), event(b"not json")])
    contents, _ = await run(egress, server)
    assert contents == ["here"]


async def test_what_is_behind_the_response_may_be_another(egress: Egress) -> None:
    def twice(asked: Asked) -> Pieces:
        return [stream(reply(asked, text("first"))), 0.05, event(reply(asked, text("last")))]

    contents, _ = await run(egress, Server(tools_call=twice))
    assert contents == ["last"]


async def test_requests_of_the_server_are_answered_while_it_waits(egress: Egress) -> None:
    answered: list[Any] = []

    def listen(asked: Asked) -> Pieces:
        answered.append((asked.json, asked.headers.get("mcp-session-id")))
        return [answer(202)]

    def talk(asked: Asked) -> Pieces:
        yield stream(b'{"jsonrpc":"2.0","id":"p","method":"ping"}')
        yield event(b'{"jsonrpc":"2.0","id":8,"method":"sampling/createMessage","params":{}}')
        deadline = time.monotonic() + 20
        while len(answered) < 2 and time.monotonic() < deadline:
            yield 0.01
        yield event(reply(asked, text(f"after {len(answered)}")))

    server = Server(
        initialize=lambda asked: [initialized(asked, Mcp_Session_Id="s")], POST=listen, tools_call=talk
    )
    contents, _ = await run(egress, server, timeout_ms=30_000)
    assert contents == ["after 2"]
    assert answered[0] == ({"jsonrpc": "2.0", "id": "p", "result": {}}, "s")
    assert answered[1][0]["id"] == 8
    assert answered[1][0]["error"]["code"] == -32601


async def test_a_lost_session_is_begun_again_once(egress: Egress) -> None:
    sessions = iter(["s-1", "s-2", "s-3"])

    def expired(asked: Asked) -> Pieces:
        if asked.headers["mcp-session-id"] == "s-1":
            return [answer(404)]
        return [called(asked)]

    server = Server(
        initialize=lambda asked: [initialized(asked, Mcp_Session_Id=next(sessions))], tools_call=expired
    )
    await run(egress, server)
    handshake = ["initialize", "notifications/initialized", "tools/call"]
    assert server.methods == [*handshake, *handshake, "DELETE"]

    always = Server(initialize=lambda asked: [initialized(asked, Mcp_Session_Id="s")], tools_call=answer(404))
    assert "404" in await fails(egress, always)
    assert always.methods == [*handshake, *handshake]


async def test_a_session_is_begun_again_once_in_all_of_a_loop(egress: Egress) -> None:
    calls = 0

    def forgetful(asked: Asked) -> Pieces:
        nonlocal calls
        calls += 1
        return [called(asked) if calls % 2 == 0 else answer(404, b"gone", Content_Encoding="gzip")]

    server = Server(initialize=lambda asked: [initialized(asked, Mcp_Session_Id="s")], tools_call=forgetful)
    with RawServer(server) as raw:
        executor = McpExecutor(egress, config(raw.url))
        assert len(await executor.run(turn(("f", "{}")))) == 1
        with pytest.raises(ToolFailed):
            await executor.run(turn(("f", "{}")))
    assert server.methods.count("initialize") == 2


@pytest.mark.parametrize("script", [answer(405), answer(500), lambda asked: []])
async def test_how_a_session_is_closed_does_not_matter(egress: Egress, script: Any) -> None:
    server = Server(initialize=lambda asked: [initialized(asked, Mcp_Session_Id="s")], DELETE=script)
    contents, _ = await run(egress, server)
    assert len(contents) == 1
    assert server.methods[-1] == "DELETE"
