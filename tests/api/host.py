"""The real API process over a real broker, and what tests do to it."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import msgspec

from schemas import ids, topics
from schemas.facts import (
    BatchFact,
    Cause,
    Ended,
    FileFact,
    KeyFact,
    KeyIssued,
    KeyRole,
    ResultFile,
    Settled,
    batch_key,
)
from schemas.ids import BatchId, OrganizationId
from schemas.money import UsageTotals
from schemas.settings import Settings
from services import process
from services.api import keys
from services.embedded.ports import free_port
from streams.blobs import open_blobs
from streams.kafka.producer import Producer
from tests.support import facts

START_S = 60.0
_COMMAND = (sys.executable, "-P", "-m", "services.cli.openrelay", "api")
CHAT = "/v1/chat/completions"
ACME, RIVAL, IDLE = "or_test_acme_00000000", "vl_test_rival_0000000", "or_test_idle_00000000"


class Host:
    """One API process in `directory`; it keeps its port from start to start.

    As a context it must end well, and have logged no error but those expected.
    """

    def __init__(self, directory: Path, settings: Settings) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.settings = settings
        self.port = free_port()
        self.child: subprocess.Popen[bytes] | None = None
        self.expected: set[str] = set()
        """Parts of log lines of level error that the test provokes."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.directory / "api.log"

    def start(self, **environ: str) -> Host:
        config = self.directory / "settings.json"
        config.write_bytes(msgspec.json.encode(self.settings))
        self.child, ready = process.spawn(
            [*_COMMAND, "--config", str(config), "--port", str(self.port)],
            log=self.log,
            environ=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])} | environ,
        )
        assert ready is not None
        deadline = time.monotonic() + START_S
        while True:
            try:
                said = os.read(ready, 100)
            except BlockingIOError:
                said = None
            if said:
                break
            if said == b"" or time.monotonic() > deadline:
                raise AssertionError(f"the API did not start:\n{self.log.read_text('utf-8')[-8000:]}")
            time.sleep(0.01)
        os.close(ready)
        return self

    def __enter__(self) -> Host:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                assert self.stop() == 0
                self.check_log()
        finally:
            self.kill()

    def stop(self) -> int:
        return self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def _end(self, how: signal.Signals) -> int:
        if self.child is None:
            return 0
        self.child.send_signal(how)
        status = self.child.wait(60)
        self.child = None
        return status

    def check_log(self) -> None:
        """No error was logged but those a test expects."""
        if not self.log.exists():
            return
        lines = self.log.read_text("utf-8").splitlines()
        for number, line in enumerate(lines):
            level = json.loads(line).get("level") if line.startswith("{") else "error"
            if level in ("error", "critical") and not any(part in line for part in self.expected):
                shown = "\n".join(lines[number : number + 30])
                raise AssertionError(f"the API logged an error: {shown[:8000]}")

    def client(self, key: str | None = ACME, **headers: str) -> httpx.Client:
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, trust_env=False)


def record(custom_id: str, **body: Any) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": CHAT,
        "body": {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | body,
    }


def jsonl(records: Iterable[Any]) -> bytes:
    return b"".join(
        (each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in records
    )


def order(**fields: Any) -> dict[str, Any]:
    """The body of a create request; inline with one record unless it names a file or records."""
    if "input_file_id" not in fields and "requests" not in fields:
        fields["requests"] = [{"custom_id": "a", "body": {"model": "m"}}]
    return {"endpoint": CHAT, "completion_window": "24h"} | fields


def create(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    """A new batch."""
    answer = client.post("/v1/batches", json=order(**fields))
    assert answer.status_code == 200, answer.text
    batch: dict[str, Any] = answer.json()
    return batch


def stored(client: httpx.Client, content: bytes | None = None) -> str:
    """Id of a new file."""
    answer = upload(client, jsonl([record("a")]) if content is None else content)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def upload(client: httpx.Client, content: bytes, name: str = "x.jsonl", **fields: str) -> httpx.Response:
    return client.post("/v1/files", data={"purpose": "batch"} | fields, files={"file": (name, content)})


def error(response: httpx.Response) -> dict[str, Any]:
    """The error of an answer, checked for its shape."""
    body = response.json()
    assert set(body) == {"error"}, body
    assert set(body["error"]) == {"message", "type", "code", "param"}
    assert response.headers["x-request-id"].startswith("req_")
    found: dict[str, Any] = body["error"]
    return found


class Facts:
    """Plays the other stages: settles and ends batches by writing their facts and files."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._producer = Producer(settings.kafka, "test-facts")
        self._blobs = open_blobs(settings.storage)

    def append(self, fact: BatchFact) -> None:
        self._producer.send(
            topics.BATCHES,
            msgspec.json.encode(fact),
            key=batch_key(fact, "test"),
            partition=topics.partition_of(fact.batch, self._settings.kafka.partitions),
        )
        self._producer.flush()

    def file(self, fact: FileFact, mark: str) -> None:
        kind = str(fact.__struct_config__.tag)
        self._producer.send(
            topics.FILES, msgspec.json.encode(fact), key=f"{fact.file}:{kind}:{mark}", partition=0
        )
        self._producer.flush()

    def key(self, fact: KeyFact) -> None:
        kind = str(fact.__struct_config__.tag)
        self._producer.send(topics.KEYS, msgspec.json.encode(fact), key=f"{fact.key_id}:{kind}", partition=0)
        self._producer.flush()

    def issue(self, organization: str, role: KeyRole = KeyRole.ORGANIZATION) -> str:
        """A new key; it works once the API has read as far."""
        key = keys.make(secrets.token_bytes(keys.ENTROPY_BYTES))
        self.key(
            KeyIssued(
                key_id=keys.key_id(key),
                sha256=keys.fingerprint(key),
                organization=OrganizationId(organization),
                role=role,
                hint=keys.hint(key),
            )
        )
        return key

    def settle(self, batch: str, cause: Cause = Cause.DONE) -> None:
        self.append(_settled(batch, cause))

    def end(self, batch: str, output: bytes | None = b'{"a":1}\n', status: str = "completed") -> None:
        file = None
        if output is not None:
            name = f"batches/{batch}/output.jsonl"
            self._blobs.put(name, output)
            file = ResultFile(
                ids.output_file_id(BatchId(batch)),
                name,
                len(output),
                output.count(b"\n"),
                hashlib.sha256(output).hexdigest(),
            )
        self.append(
            Ended(
                batch=BatchId(batch),
                status=status,
                output=file,
                error=None,
                created=facts.created(batch),  # repeated for the meter; the API does not look at it
                created_at_ms=0,
                settled=_settled(batch, Cause.DONE),
            )
        )

    def finish(self, batch: str, output: bytes | None = b'{"a":1}\n') -> None:
        self.settle(batch)
        self.end(batch, output)

    def close(self) -> None:
        self._producer.close()


def _settled(batch: str, cause: Cause) -> Settled:
    return Settled(batch=BatchId(batch), completed=1, failed=0, usage=UsageTotals(), cause=cause)


def complete(host: Host, file: str, key: str = ACME) -> httpx.Response:
    with host.client(key) as client:
        return client.post(f"/v1/files/{file}/complete")


def content(host: Host, file: str) -> bytes:
    with host.client() as client:
        return client.get(f"/v1/files/{file}/content").raise_for_status().content
