"""A small inference host for tests of `orl`: real HTTP, scripted trouble, no work done.

A batch moves on by one state each time it is read: validating, in_progress, finalizing, and its end.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from services.embedded.ports import free_port

KEY = "or_standin_key_0123456789"


class StandIn:
    """The server's state, open to the test.

    `trouble` is what befalls the next requests, in order: `(method, path prefix, what)`, where `what` is a
    status with its headers, `"lost"` (done, but the answer never arrives) or `"cut:N"` (a download that
    breaks after N bytes).
    """

    def __init__(self) -> None:
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}/v1"
        self.requests: list[tuple[str, str]] = []
        self.trouble: deque[tuple[str, str, Any]] = deque()
        self.files: dict[str, bytes] = {}
        self.batches: dict[str, dict[str, Any]] = {}
        self.created: list[str] = []
        self.keys: dict[str, str] = {}
        self.end: dict[str, Any] = {"status": "completed", "completed": 2, "failed": 0}
        self.errors: list[dict[str, Any]] = []
        self.error_lines: list[dict[str, Any]] = []
        self.usage = {
            "model": "m",
            "requests": 3,
            "input_tokens": 30,
            "cached_tokens": 5,
            "output_tokens": 7,
            "cost_nano_usd": 1_234_500_000,
        }
        self.hold = threading.Event()
        """Cleared: batches stay in progress."""
        self.hold.set()

    def count(self, method: str, path: str) -> int:
        return sum(1 for request in self.requests if request == (method, path))

    def _trouble(self, method: str, path: str) -> Any:
        if self.trouble and self.trouble[0][0] == method and path.startswith(self.trouble[0][1]):
            return self.trouble.popleft()[2]
        return None

    async def handle(self, request: Request) -> Response:
        method, path = request.method, request.url.path.removeprefix("/v1")
        self.requests.append((method, path))
        trouble = self._trouble(method, path)
        if isinstance(trouble, tuple):
            await request.body()
            status, headers = trouble
            body = {"error": {"message": f"Trouble {status}.", "type": "server_error", "code": "trouble"}}
            return JSONResponse(body, status, {"x-request-id": "req_1", **headers})
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return _error(401, "invalid_api_key", "The API key is not valid.")
        answer = await self._answer(request, method, path)
        if trouble == "lost":
            return StreamingResponse(_breaks(b""), headers={"content-length": "9"})
        if isinstance(trouble, str):
            cut = bytes(answer.body)[: int(trouble.removeprefix("cut:"))]
            headers = dict(answer.headers)
            return StreamingResponse(_breaks(cut), answer.status_code, headers)
        return answer

    async def _answer(self, request: Request, method: str, path: str) -> Response:
        match method, path.strip("/").split("/"):
            case "GET", ["usage"]:
                return JSONResponse({"object": "list", "data": [self.usage | dict(request.query_params)]})
            case "GET", ["lag"]:
                row = {"group": "settle", "topic": "results", "partitions": 8, "lag": 3}
                return JSONResponse({"object": "list", "data": [row]})
            case "GET", ["models"]:
                return JSONResponse({"object": "list", "data": [{"id": "m"}]})
            case "POST", ["files"]:
                form = await request.form()
                assert form["purpose"] == "batch"
                file_id = f"file-{len(self.files)}"
                self.files[file_id] = await form["file"].read()  # type: ignore[union-attr]
                await form.close()
                return JSONResponse(self._file(file_id))
            case "GET", ["files"]:
                return JSONResponse(
                    {"object": "list", "data": [*map(self._file, self.files)], "has_more": False}
                )
            case "GET", ["files", file_id] if file_id in self.files:
                return JSONResponse(self._file(file_id))
            case "DELETE", ["files", file_id] if file_id in self.files:
                del self.files[file_id]
                return JSONResponse({"id": file_id, "object": "file", "deleted": True})
            case "GET", ["files", file_id, "content"] if file_id in self.files:
                return self._content(request, self.files[file_id])
            case "POST", ["batches"]:
                return self._create(await request.json(), request.headers.get("idempotency-key"))
            case "GET", ["batches"]:
                newest = [self.batches[name] for name in reversed(self.created)]
                return JSONResponse({"object": "list", "data": newest, "has_more": False, "last_id": None})
            case "GET", ["batches", batch_id] if batch_id in self.batches:
                return JSONResponse(self._advance(self.batches[batch_id]))
            case "POST", ["batches", batch_id, "cancel"] if batch_id in self.batches:
                self.end = {"status": "cancelled", "completed": 0, "failed": 2}
                return JSONResponse({**self.batches[batch_id], "status": "cancelling"})
        return _error(404, "not_found", "There is no such thing.")

    def _file(self, file_id: str) -> dict[str, Any]:
        return {
            "id": file_id,
            "object": "file",
            "bytes": len(self.files[file_id]),
            "created_at": 1_790_000_000,
            "expires_at": 1_792_592_000,
            "filename": f"{file_id}.jsonl",
            "purpose": "batch",
            "status": "processed",
        }

    def _content(self, request: Request, data: bytes) -> Response:
        headers = {"etag": '"same"'}
        wanted = request.headers.get("range")
        if wanted and request.headers.get("if-range") == '"same"':
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            headers["content-range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            return Response(data[start:], 206, headers)
        return Response(data, headers=headers)

    def _create(self, body: dict[str, Any], key: str | None) -> Response:
        if body["input_file_id"] not in self.files:
            return _error(404, "not_found", "There is no such file.")
        if key is not None and key in self.keys:
            return JSONResponse(self.batches[self.keys[key]])
        batch_id = f"batch_{len(self.created)}"
        if key is not None:
            self.keys[key] = batch_id
        self.created.append(batch_id)
        self.batches[batch_id] = {
            "id": batch_id,
            "object": "batch",
            "endpoint": body["endpoint"],
            "model": "m",
            "priority": body.get("priority", "standard"),
            "input_file_id": body["input_file_id"],
            "completion_window": body["completion_window"],
            "status": "validating",
            "created_at": int(time.time()),
            "expires_at": int(time.time()) + 86_400,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "metadata": body.get("metadata"),
        }
        return JSONResponse(self.batches[batch_id])

    def _advance(self, batch: dict[str, Any]) -> dict[str, Any]:
        completed, failed = self.end["completed"], self.end["failed"]
        total = completed + failed
        match batch["status"]:
            case "validating":
                batch.update(
                    status="in_progress", request_counts={"total": total, "completed": 0, "failed": 0}
                )
            case "in_progress" if self.hold.is_set():
                counts = {"total": total, "completed": completed, "failed": failed}
                batch.update(status="finalizing", request_counts=counts)
            case "finalizing":
                batch.update(status=self.end["status"])
                for kind, lines in (("output", [{}] * completed), ("error", self.error_lines)):
                    if lines:
                        name = f"file-{batch['id']}-{kind}"
                        self.files[name] = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
                        batch[f"{kind}_file_id"] = name
        return batch


def _error(status: int, code: str, message: str) -> Response:
    detail = {"message": message, "type": "invalid_request_error", "code": code, "param": None}
    return JSONResponse({"error": detail}, status, {"x-request-id": "req_42"})


async def _breaks(data: bytes) -> AsyncIterator[bytes]:
    if data:
        yield data
    raise ConnectionError("on purpose")


@contextlib.contextmanager
def standing_in() -> Iterator[StandIn]:
    """A running stand-in, in a thread of this process."""
    state = StandIn()
    routes = [Route("/{path:path}", state.handle, methods=["GET", "POST", "DELETE"])]
    config = uvicorn.Config(
        Starlette(routes=routes), host="127.0.0.1", port=state.port, log_config=None, lifespan="off"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + 10
        while not server.started:
            assert thread.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield state
    finally:
        server.should_exit = True
        thread.join()
