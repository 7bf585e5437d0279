"""Checking inputs off the event loop, in processes that end with this one."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import services
from schemas.ids import OrganizationId
from schemas.settings import Storage
from services.api import checker, refusals
from services.api.checker import Fault, Job, Outcome, Reply
from services.api.checking import Check, LayOut, Open, Opened, Verdict, Written
from services.api.refusals import Refusal
from services.api.turns import Turns
from streams import metrics

WORKERS = 3
WORKERS_EACH = 2
"""Of one organization: the worst file keeps a worker for half a minute, and somebody else comes meanwhile."""
JOB_TIMEOUT_S = 180.0
"""Many times what the worst file takes; past it the worker is stuck and is replaced."""

log = logging.getLogger("openrelay.api")


class WorkerDied(Exception):
    """The worker ended in the middle of a job."""


class Validation:
    """Jobs beyond the number of workers wait, organizations in turn. A worker is started by its first job."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._turns = Turns(WORKERS, WORKERS_EACH)
        self._threads = ThreadPoolExecutor(WORKERS, thread_name_prefix="validation")
        self._local = threading.local()
        self._workers: set[_Worker] = set()

    async def open(self, organization: OrganizationId, job: Open, body_fd: int) -> Opened:
        """Take the body in this file apart."""
        outcome = await self._run(organization, job, body_fd, job.max_records)
        assert isinstance(outcome, Opened)
        return outcome

    async def check(self, organization: OrganizationId, job: Check) -> Verdict:
        """Judge every record; refuses what cannot be an input at all."""
        with metrics.API_VALIDATION_SECONDS.time():
            outcome = await self._run(organization, job, None, job.limits.max_records)
        assert isinstance(outcome, Verdict)
        metrics.API_VALIDATED_RECORDS.labels("rejected").inc(outcome.rejected)
        metrics.API_VALIDATED_RECORDS.labels("accepted").inc(outcome.total - outcome.rejected)
        metrics.API_VALIDATED_BYTES.inc(outcome.bytes)
        return outcome

    async def lay_out(self, organization: OrganizationId, job: LayOut, body_fd: int) -> None:
        """Write the records of the body in this file as an input file."""
        outcome = await self._run(organization, job, body_fd, len(job.items))
        assert isinstance(outcome, Written)

    def close(self) -> None:
        for worker in list(self._workers):
            worker.end()
        self._threads.shutdown(wait=True, cancel_futures=True)

    async def _run(
        self, organization: OrganizationId, work: Open | LayOut | Check, body_fd: int | None, most: int
    ) -> Outcome:
        message = checker.encode(Job(self._storage, work))
        loop = asyncio.get_running_loop()
        try:
            async with self._turns.take(organization):
                outcome = await loop.run_in_executor(self._threads, self._call, message, body_fd)
        except WorkerDied as error:
            log.error("%s", error)
            raise refusals.unavailable() from error
        if isinstance(outcome, Fault):
            raise _refusal(outcome, most)
        return outcome

    def _call(self, message: bytes, body_fd: int | None) -> Outcome:
        """Runs in one of the threads, each of which has a worker of its own."""
        worker: _Worker | None = getattr(self._local, "worker", None)
        if worker is None:
            worker = self._local.worker = _Worker()
            self._workers.add(worker)
        try:
            reply = worker.call(message, [] if body_fd is None else [body_fd])
        except (OSError, EOFError) as error:
            self._drop(worker)
            raise WorkerDied(f"validation worker ended within a job: {error!r}") from error
        if reply.leaving:
            self._drop(worker)
        return reply.outcome

    def _drop(self, worker: _Worker) -> None:
        worker.end()
        self._workers.discard(worker)
        self._local.worker = None


class _Worker:
    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        self._channel.settimeout(JOB_TIMEOUT_S)
        root = str(Path(services.__file__).parents[1])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "services.api.checker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=os.environ | {"PYTHONPATH": root},
                start_new_session=True,
            )

    def call(self, message: bytes, fds: list[int]) -> Reply:
        checker.send(self._channel, message, fds)
        return checker.decode_reply(checker.receive(self._channel)[0])

    def end(self) -> None:
        self._channel.close()
        self._process.kill()
        self._process.wait()


def _refusal(fault: Fault, most: int) -> Refusal:
    match fault.kind:
        case "missing":
            return refusals.not_found()
        case "utf16":
            return refusals.invalid("The file is UTF-16; send UTF-8.", "file", "unsupported_encoding")
        case "too_many":
            return too_many_records(most)
        case "storage":
            log.error("%s", fault.message)
            return refusals.unavailable()
        case _:
            return refusals.invalid(f"The body {fault.message}.")


def too_many_records(most: int) -> Refusal:
    return refusals.invalid(f"There are more than {most:,} records; split them.", code="too_many_records")
