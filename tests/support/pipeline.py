"""The stages without the API: batches are created by writing their facts, roles run as real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from schemas import ids, topics
from schemas.facts import BatchFact, Cancel, Priority, batch_key
from schemas.ids import BatchId, OrganizationId
from schemas.settings import Settings
from services import process
from streams.blobs.stores import open_blobs
from streams.core import pricing
from streams.core.lifecycle import BatchState, fold
from streams.intake import Intake
from streams.kafka.admin import create_topics
from streams.kafka.follow import Follower
from streams.kafka.messages import Message
from streams.kafka.producer import Producer
from tests.support import facts
from tests.support.command import environment, openrelay
from tests.support.memory import peak_mib
from tests.support.settings import MODEL, ORGANIZATION
from tests.support.until import until

START_S = 60.0
_encode = msgspec.json.Encoder().encode
_decode_fact = msgspec.json.Decoder(BatchFact).decode


class Pipeline:
    """Topics, facts and role processes of one test, in one directory."""

    def __init__(self, directory: Path, settings: Settings) -> None:
        self.directory = directory
        self.settings = settings
        self.blobs = open_blobs(settings.storage)
        self.config = directory / "settings.json"
        self.config.write_bytes(_encode(settings))
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.states: dict[BatchId, BatchState] = {}
        self._lock = threading.Lock()
        create_topics(settings)
        self._producer = Producer(settings.kafka, "test-pipeline")
        self._follower = Follower(settings.kafka, "test-pipeline-facts", [topics.BATCHES], self._apply)
        self._follower.start()
        self.intake: Intake | None = None

    # ---- roles ----

    def start(self, *roles: str, **variables: str) -> None:
        """Start roles such as `dispatch` or `dispatch-2`, and wait until they serve."""
        pipes = {}
        for name in roles:
            if name == "intake":
                self.intake = Intake(self.settings, self.blobs)
                self.intake.start()
                continue
            assert name not in self.children or self.children[name].poll() is not None, f"{name} runs"
            kind, _, number = name.partition("-")
            slot = str(int(number or 1) - 1)
            child, pipe = process.spawn(
                [*openrelay(), kind, "--config", str(self.config), "--slot", slot],
                log=self.log(name),
                environ=environment(**variables),
            )
            self.children[name] = child
            pipes[name] = pipe
        for name, pipe in pipes.items():
            assert pipe is not None
            os.set_blocking(pipe, True)
            with os.fdopen(pipe, "rb") as reading:
                assert reading.readline() == b"ready\n", f"{name} did not start:\n{self.tail(name)}"

    def kill(self, name: str) -> None:
        child = self.children.pop(name)
        child.send_signal(signal.SIGKILL)
        child.wait()

    def signal(self, name: str, number: signal.Signals) -> None:
        self.children[name].send_signal(number)

    def revived(self, **variables: str) -> bool:
        """True, after roles that have ended by themselves were started again, as a supervisor does."""
        for name, child in list(self.children.items()):
            if child.poll() is not None:
                del self.children[name]
                self.start(name, **variables)
        return True

    def reconfigure(self, settings: Settings) -> None:
        """Give the roles other settings and make those that listen read them."""
        self.config.write_bytes(_encode(settings))
        for name in self.children:
            if name.startswith("dispatch"):
                self.signal(name, signal.SIGHUP)

    def stop(self, name: str) -> int:
        """SIGTERM; the exit status."""
        child = self.children.pop(name)
        child.send_signal(signal.SIGTERM)
        return child.wait(timeout=60)

    def peak_mib(self, name: str) -> int:
        """The most memory a role has had resident."""
        return peak_mib(self.children[name].pid)

    def log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def tail(self, name: str) -> str:
        return self.log(name).read_text("utf-8")[-3000:] if self.log(name).exists() else "(no log)"

    def close(self) -> None:
        for child in self.children.values():
            if child.poll() is None:
                child.send_signal(signal.SIGKILL)
            child.wait()
        if self.intake is not None:
            self.intake.stop()
        self._follower.stop()
        self._producer.close()

    # ---- batches ----

    def create(
        self,
        records: Iterable[dict[str, Any] | bytes],
        *,
        organization: str = ORGANIZATION,
        model: str = MODEL,
        priority: Priority = Priority.STANDARD,
        window_s: float = 3600.0,
    ) -> BatchId:
        """A batch of accepted records, as the API would have created it."""
        lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in records]
        batch = ids.batch_id(os.urandom(ids.ENTROPY_BYTES))
        self.blobs.put(f"batches/{batch}/input.jsonl", b"".join(line + b"\n" for line in lines))
        fact = facts.created(
            batch,
            organization=OrganizationId(organization),
            priority=priority,
            input_object=f"batches/{batch}/input.jsonl",
            window_s=window_s,
            total=len(lines),
            rejected=0,
            model=model,
            price=pricing.price(model, self.settings.models[model], priority),
        )
        self._append(fact)
        return batch

    def cancel(self, batch: BatchId) -> None:
        self._append(Cancel(batch=batch))

    def _append(self, fact: BatchFact) -> None:
        partition = topics.partition_of(fact.batch, self.settings.kafka.partitions)
        self._producer.send(
            topics.BATCHES, _encode(fact), key=batch_key(fact, os.urandom(4).hex()), partition=partition
        )
        self._producer.flush()

    def _apply(self, messages: list[Message]) -> None:
        with self._lock:
            for message in messages:
                assert message.value is not None
                fact = _decode_fact(message.value)
                state = self.states.get(fact.batch, BatchState())
                self.states[fact.batch] = fold(state, fact, message.timestamp_ms)

    def state(self, batch: BatchId) -> BatchState:
        with self._lock:
            return self.states.get(batch, BatchState())

    def wait_ended(self, batch: BatchId, timeout_s: float = 120.0) -> BatchState:
        """The state of the batch once it has ended; a role that has died meanwhile fails the test."""

        def ended() -> bool:
            for name, child in self.children.items():
                assert child.poll() is None, f"{name} has ended:\n{self.tail(name)}"
            assert self.intake is None or self.intake.failure is None, self.intake.failure
            return self.state(batch).ended is not None

        until(ended, timeout_s, lambda: self.explain(batch))
        return self.state(batch)

    def explain(self, batch: BatchId) -> str:
        state = self.state(batch)
        facts = {
            name: getattr(state, name) is not None for name in ("created", "enqueued", "settled", "ended")
        }
        return f"{batch}: {facts}\n" + "\n".join(f"== {name}\n{self.tail(name)}" for name in self.children)

    def lines(self, batch: BatchId, which: str) -> list[dict[str, Any]]:
        """The lines of a result file, `output` or `error`; empty when there is none."""
        ended = self.state(batch).ended
        assert ended is not None
        result = getattr(ended, which)
        return [] if result is None else [json.loads(x) for x in self.blobs.read(result.object).splitlines()]


def record(custom_id: str, prompt: str, model: str = MODEL, **body: Any) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": model, "messages": [{"role": "user", "content": prompt}], **body},
    }


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def with_tools(custom_id: str, prompt: str, url: str, model: str = MODEL, **config: Any) -> dict[str, Any]:
    """A record whose tools are run by `url`."""
    return record(custom_id, prompt, model, tools=TOOLS, openrelay={"tool_config": {"url": url, **config}})
