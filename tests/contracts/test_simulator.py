"""The simulated model server over HTTP: what an OpenAI-compatible server does, and its faults on purpose."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from services.embedded.ports import free_port
from services.simulator.calls import Calls
from services.simulator.model import Options, SimulatedModel
from services.simulator.serve import allow_open_files, serving

CHAT = "/v1/chat/completions"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[serving]:
    with (tmp_path / "calls.jsonl").open("ab") as log:
        model = SimulatedModel(["m", "other"], Options(concurrency=4), Calls(log), seed=1)
        async with serving("127.0.0.1", 0, model) as running:
            yield running


@pytest.fixture
async def client(server: serving) -> AsyncIterator[httpx.AsyncClient]:
    base = f"http://127.0.0.1:{server.port}"
    async with httpx.AsyncClient(base_url=base, timeout=10, trust_env=False) as opened:
        yield opened


def request(text: str, model: str = "m") -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}]}


def raw(text: str, head: str = "") -> bytes:
    body = json.dumps(request(text)).encode()
    return f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def until(condition: Callable[[], bool], deadline_s: float = 5.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110 (numbers of a server, which sets no events)
            await asyncio.sleep(0.005)


def log(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]


async def test_the_openai_sdk_speaks_to_it(server: serving) -> None:
    base = f"http://127.0.0.1:{server.port}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="or_any", max_retries=0) as sdk:
        chat = await sdk.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hello you"}]
        )
        assert chat.choices[0].message.content == "You asked: hello you"
        assert chat.usage is not None
        assert chat.usage.total_tokens == 6
        text = await sdk.completions.create(model="other", prompt="hello")
        assert (text.choices[0].text, text.model) == ("You asked: hello", "other")
        assert [model.id async for model in sdk.models.list()] == ["m", "other"]
        with pytest.raises(openai.NotFoundError) as unknown:
            await sdk.chat.completions.create(model="x", messages=[{"role": "user", "content": "a"}])
        assert unknown.value.code == "model_not_found"
        assert "`x`" in unknown.value.message
        with pytest.raises(openai.BadRequestError):
            await sdk.chat.completions.create(model="m", messages=[])
        with pytest.raises(openai.RateLimitError) as limited:
            await sdk.chat.completions.create(**request("retry-after:2:9"))
        assert limited.value.response.headers["retry-after"] == "2"


async def test_faults_for_the_first_calls_of_a_prompt(client: httpx.AsyncClient) -> None:
    async def statuses(text: str) -> list[int]:
        return [(await client.post(CHAT, json=request(text))).status_code for _ in range(3)]

    assert await statuses("status:503:2 a") == [503, 503, 200]
    assert await statuses("status:503:1 b") == [503, 200, 200]
    with pytest.raises(httpx.RemoteProtocolError):
        await client.post(CHAT, json=request("drop:1 c"))
    assert await statuses("drop:1 c") == [200, 200, 200]


async def test_broken_connections(client: httpx.AsyncClient) -> None:
    with pytest.raises(httpx.RemoteProtocolError, match="without sending"):
        await client.post(CHAT, json=request("drop"))
    with pytest.raises(httpx.ReadError):
        await client.post(CHAT, json=request("reset"))
    async with client.stream("POST", CHAT, json=request("half")) as answer:
        assert answer.status_code == 200
        with pytest.raises(httpx.RemoteProtocolError, match="without sending complete"):
            await answer.aread()


async def test_dripping_takes_a_pause_a_byte(client: httpx.AsyncClient) -> None:
    started = time.monotonic()
    answer = await client.post(CHAT, json=request("drip:0.001"))
    assert answer.json()["choices"]
    assert time.monotonic() - started >= 0.001 * len(answer.content)


async def test_hanging_ends_with_the_client_and_frees_its_slot(
    server: serving, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    with pytest.raises(httpx.ReadTimeout):
        await client.post(CHAT, json=request("hang"), timeout=0.1)
    await until(lambda: server.model.running == 0)
    assert server.model.stats().aborted == 1
    await until(lambda: bool(log(tmp_path)))
    assert log(tmp_path)[0]["status"] is None
    assert log(tmp_path)[0]["t_end"] - log(tmp_path)[0]["t_start"] >= 0.09


async def test_calls_beyond_the_slots_wait_and_are_reported(
    server: serving, client: httpx.AsyncClient
) -> None:
    calls = [asyncio.create_task(client.post(CHAT, json=request(f"slow:0.3 {n}"))) for n in range(10)]
    await until(lambda: server.model.stats().waiting == 6)
    metrics = (await client.get("/metrics")).text
    label = '{engine="0",model_name="m"}'
    assert f"vllm:num_requests_running{label} 4.0\n" in metrics
    assert f"vllm:num_requests_waiting{label} 6.0\n" in metrics
    assert f"vllm:kv_cache_usage_perc{label} 1.0\n" in metrics
    assert f"vllm:num_preemptions_total{label} 0.0\n" in metrics
    assert all(answer.status_code == 200 for answer in await asyncio.gather(*calls))
    stats = (await client.get("/stats")).json()
    assert (stats["peak_running"], stats["peak_open"], stats["running"]) == (4, 10, 0)


async def test_a_waiting_call_whose_client_leaves_never_starts(
    server: serving, client: httpx.AsyncClient
) -> None:
    holding = [asyncio.create_task(client.post(CHAT, json=request(f"slow:0.3 {n}"))) for n in range(4)]
    await until(lambda: server.model.running == 4)
    with pytest.raises(httpx.ReadTimeout):
        await client.post(CHAT, json=request("late"), timeout=0.05)
    await until(lambda: server.model.stats().waiting == 0)
    await asyncio.gather(*holding)
    assert server.model.running == 0


async def test_control_changes_a_running_server(server: serving, client: httpx.AsyncClient) -> None:
    assert (await client.get("/health")).status_code == 200
    await client.post("/control", json={"healthy": False, "status": 503})
    assert (await client.get("/health")).status_code == 503
    assert (await client.post(CHAT, json=request("hello"))).status_code == 503
    await client.post("/control", json={"healthy": True, "behaviour": "slow:0.1", "probes": False})
    started = time.monotonic()
    assert (await client.post(CHAT, json=request("status:500"))).status_code == 200
    assert time.monotonic() - started >= 0.1
    assert (await client.get("/health")).status_code == 404
    assert (await client.get("/metrics")).status_code == 404
    after = await client.post("/control", json={"status": None, "latency_ms": 50, "reset": True})
    assert after.json()["calls"] == 0
    assert after.json()["options"]["latency_ms"] == 50
    started = time.monotonic()
    assert (await client.post(CHAT, json=request("hello"))).status_code == 200
    assert time.monotonic() - started >= 0.05


@pytest.mark.parametrize("change", ['{"latency": 1}', '{"concurrency": 0}', "[]", '{"latency_ms": -1}'])
async def test_control_refuses_what_it_does_not_know(client: httpx.AsyncClient, change: str) -> None:
    answer = await client.post("/control", content=change)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_control"


async def test_more_slots_let_waiting_calls_start(server: serving, client: httpx.AsyncClient) -> None:
    await client.post("/control", json={"concurrency": 1})
    hanging = asyncio.create_task(client.post(CHAT, json=request("hang")))
    await until(lambda: server.model.running == 1)
    waiting = asyncio.create_task(client.post(CHAT, json=request("next")))
    await until(lambda: server.model.stats().waiting == 1)
    await client.post("/control", json={"concurrency": 2})
    assert (await waiting).status_code == 200
    hanging.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await hanging


async def test_the_log_and_the_counts_name_every_call(
    server: serving, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    await client.post("/control", json={"log_bodies": True})
    for text in ("a", "b", "b", "status:500 c"):
        await client.post(CHAT, json=request(text))
    await client.post(CHAT, json=request("d", "unknown"))
    calls = (await client.get("/calls")).json()
    prompts = {"a": 1, "b": 2, "status:500 c": 1, "d": 1}
    assert calls == {"count": 5, "prompts": prompts, "truncated": False}
    await until(lambda: len(log(tmp_path)) == 5)
    lines = log(tmp_path)
    assert [line["marker"] for line in lines] == ["a", "b", "b", "status:500 c", "d"]
    assert [line["status"] for line in lines] == [200, 200, 200, 500, 404]
    assert lines[1]["prompt"] == lines[2]["prompt"] != lines[0]["prompt"]
    assert lines[0]["body"] == request("a")
    assert lines[0]["t_arrived"] <= lines[0]["t_start"] <= lines[0]["t_end"]
    assert [line["concurrency"] for line in lines] == [1, 1, 1, 1, 0]


async def test_unknown_routes(client: httpx.AsyncClient) -> None:
    for method, path in (("GET", CHAT), ("POST", "/v1/embeddings"), ("GET", "/"), ("DELETE", "/control")):
        answer = await client.request(method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert (await client.get("/stats?verbose=1")).status_code == 200


async def test_large_and_chunked_bodies(client: httpx.AsyncClient) -> None:
    async def pieces(body: bytes) -> AsyncIterator[bytes]:
        for at in range(0, len(body), 1 << 20):
            yield body[at : at + (1 << 20)]

    body = json.dumps(request("word " * 4_000_000)).encode()
    answer = await client.post(CHAT, content=pieces(body))
    assert answer.json()["usage"]["prompt_tokens"] == 4_000_000
    assert (await client.post(CHAT, content=body)).status_code == 200
    answer = await client.post(CHAT, content=b" " * (32 * 1024 * 1024 + 1))
    assert (answer.status_code, answer.headers["connection"]) == (413, "close")


async def test_a_large_answer(client: httpx.AsyncClient) -> None:
    answer = await client.post(CHAT, json=request("big:20000000"))
    assert len(answer.json()["choices"][0]["message"]["content"]) == 20_000_000


async def test_pipelined_requests_are_answered_in_their_order(server: serving) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    texts = ["slow:0.1 first", "second", "slow:0.05 third", *(f"more {n}" for n in range(500))]
    for text in texts:
        writer.write(raw(text))
    await writer.drain()
    for text in texts:
        assert await _answer(reader) == f"You asked: {text}"
    writer.close()
    await writer.wait_closed()


async def test_a_request_may_arrive_in_any_pieces(server: serving) -> None:
    pieces = [b'{"model":"m","messages":[{"ro', b'le":"user","content":"slow:0.01 in pieces"}]}', b""]
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    chunked = head + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    sent = (raw("one") + chunked) * 2
    for at in range(len(sent)):
        writer.write(sent[at : at + 1])
        if at % 7 == 0:
            await asyncio.sleep(0)
    for text in ("one", "slow:0.01 in pieces") * 2:
        assert await _answer(reader) == f"You asked: {text}"
    writer.close()
    await writer.wait_closed()


async def test_a_client_that_leaves_with_requests_in_the_pipe(server: serving) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for _ in range(3):
        writer.write(raw("hang"))
    await writer.drain()
    await until(lambda: server.model.running == 1)
    writer.transport.abort()
    await until(lambda: server.model.running == 0)
    assert server.model.stats().calls == 1


async def _answer(reader: asyncio.StreamReader) -> str:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length: "))
    body = json.loads(await reader.readexactly(int(length[16:])))
    content: str = body["choices"][0]["message"]["content"]
    return content


async def test_connection_close_and_expect_continue(server: serving) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    whole = raw("one", "Expect: 100-continue\r\n")
    head, body = whole[: whole.index(b"\r\n\r\n") + 4], whole[whole.index(b"\r\n\r\n") + 4 :]
    writer.write(head)
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5) == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert await _answer(reader) == "You asked: one"
    writer.write(raw("two", "Connection: close\r\n"))
    answer = await asyncio.wait_for(reader.read(), 5)
    assert b"connection: close\r\n" in answer
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01 not HTTP\r\n\r\n", b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n"]
)
async def test_what_is_not_http_is_refused(server: serving, sent: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(sent)
    assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 400 ")
    writer.close()
    await writer.wait_closed()


async def test_latency_is_log_normal_and_repeats_with_the_seed() -> None:
    def latencies(seed: int) -> list[float]:
        options = Options(latency_ms=100, latency_sigma=0.5)
        model = SimulatedModel([], options, Calls(None), seed)
        return sorted(model._latency_s() for _ in range(1001))

    assert latencies(1) == latencies(1) != latencies(2)
    assert latencies(1)[500] == pytest.approx(0.1, rel=0.1)
    assert latencies(1)[840] == pytest.approx(0.1 * 2.718**0.5, rel=0.15)


_PROGRAM = """
import sys
from services.simulator.serve import run
run("127.0.0.1", int(sys.argv[1]), models=["m"], ready=lambda: print("ready", flush=True))
"""


def test_a_process_says_when_it_is_ready_and_ends_on_sigterm() -> None:
    port = free_port()
    command = [sys.executable, "-c", _PROGRAM, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=os.getcwd()) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            assert client.post(CHAT, json=request("hello")).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(5) == 0


async def test_two_thousand_calls_at_once() -> None:
    allow_open_files()
    model = SimulatedModel(["m"], Options(concurrency=2000, latency_ms=300), Calls(None), seed=1)
    async with serving("127.0.0.1", 0, model) as server:
        connections = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2000)]
        for number, (_, writer) in enumerate(connections):
            writer.write(raw(f"call {number}"))
        answers = await asyncio.gather(*(_answer(reader) for reader, _ in connections))
        for _, writer in connections:
            writer.close()
    assert answers == [f"You asked: call {number}" for number in range(2000)]
    assert model.peak_running > 1000
