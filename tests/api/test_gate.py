"""The gate on its own: before anything is known, and when a handler fails."""

from __future__ import annotations

import errno
import logging
import os
from typing import Any

import httpx
import pytest

from schemas.settings import Http, Organization
from services.api.cors import Cors
from services.api.exchange import Message, Receive, Send
from services.api.gate import Gate
from services.api.principals import Principals
from tests.api.host import ACME, error


def gate(app: Any, *, ready: bool = True) -> Gate:
    principals = Principals([Organization(id="acme", api_keys=(ACME,))], lambda _: None)
    http = Http()
    return Gate(app, principals, http, Cors(http), lambda: ready, lambda _: None)


async def ask(app: Any, path: str = "/v1/files", *, ready: bool = True) -> httpx.Response:
    transport = httpx.ASGITransport(gate(app, ready=ready))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        return await client.get(path, headers={"authorization": f"Bearer {ACME}"})


async def never(scope: Any, receive: Receive, send: Send) -> None:
    raise AssertionError("not reached")


@pytest.mark.parametrize("path", ["/v1/files", "/v1/models", "/nowhere", "/health", "/v1/uploads/x"])
async def test_a_starting_api_answers_503_to_everything(path: str) -> None:
    answer = await ask(never, path, ready=False)
    assert answer.status_code == 503
    assert error(answer)["code"] == "unavailable"
    assert 0 < int(answer.headers["retry-after"]) <= 60


async def test_a_handler_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(scope: Any, receive: Receive, send: Send) -> None:
        raise ZeroDivisionError("secret-detail")

    with caplog.at_level(logging.ERROR):
        answer = await ask(broken)
    assert answer.status_code == 500
    assert error(answer)["type"] == "server_error"
    assert "secret-detail" not in answer.text
    assert answer.headers["x-request-id"] in caplog.text


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EDQUOT])
async def test_storage_that_is_full(reason: int, caplog: pytest.LogCaptureFixture) -> None:
    async def full(scope: Any, receive: Receive, send: Send) -> None:
        raise OSError(reason, os.strerror(reason))

    with caplog.at_level(logging.ERROR):
        answer = await ask(full)
    assert answer.status_code == 503
    assert error(answer)["code"] == "unavailable"
    assert 0 < int(answer.headers["retry-after"]) <= 60
    assert "the storage is full" in caplog.text
    assert answer.headers["x-request-id"] in caplog.text


async def test_a_handler_that_fails_while_answering() -> None:
    async def broken(scope: Any, receive: Receive, send: Send) -> None:
        start: Message = {"type": "http.response.start", "status": 200, "headers": []}
        await send(start)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await ask(broken)


async def test_the_log_has_no_query(caplog: pytest.LogCaptureFixture) -> None:
    async def fine(scope: Any, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    with caplog.at_level(logging.INFO, logger="openrelay.api"):
        await ask(fine, "/v1/uploads/x?signature=canary")
    assert "/v1/uploads/x" in caplog.text
    assert "canary" not in caplog.text.replace("http://x/v1/uploads/x?signature=canary", "")
