"""A process that checks inputs for an API process: one job at a time, over a socket.

It ends when its parent does, whatever it is doing: a thread waits for the socket's end. It also ends after
a job that took much memory, since the interpreter gives little of it back.
"""

from __future__ import annotations

import gc
import mmap
import os
import queue
import resource
import signal
import socket
import sys
import threading

import msgspec

from schemas.settings import Storage
from services.api.checking import Check, LayOut, Open, Opened, Verdict, Written, check, lay_out, open_request
from services.api.inline import TooManyItems
from streams.blobs import BlobMissing, Blobs, open_blobs, why_failed
from streams.core.strictjson import NotJson
from streams.core.validate import TooManyRecords, UnsupportedEncoding

MAX_KEPT_BYTES = 512 * 1024 * 1024
LENGTH_BYTES = 4


class Job(msgspec.Struct, frozen=True):
    """The body of a create request comes along as an open file when the work is about one."""

    storage: Storage
    work: Open | LayOut | Check


class Fault(msgspec.Struct, frozen=True, tag="fault"):
    """The input cannot be used: `missing`, `utf16`, `too_many`, `not_json`; or the `storage` fails."""

    kind: str
    message: str = ""


Outcome = Opened | Written | Verdict | Fault


class Reply(msgspec.Struct, frozen=True):
    outcome: Outcome
    leaving: bool
    """The process ends now."""


encode = msgspec.msgpack.encode
decode_job = msgspec.msgpack.Decoder(Job).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


def send(channel: socket.socket, message: bytes, fds: list[int]) -> None:
    socket.send_fds(channel, [len(message).to_bytes(LENGTH_BYTES, "big")], fds)
    channel.sendall(message)


def receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    """One message and the files that came with it; raises EOFError at the end of the channel."""
    head, fds, _, _ = socket.recv_fds(channel, LENGTH_BYTES, 1)
    head += _exactly(channel, LENGTH_BYTES - len(head)) if head else b""
    if len(head) < LENGTH_BYTES:
        raise EOFError
    return _exactly(channel, int.from_bytes(head, "big")), list(fds)


def _exactly(channel: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(size - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Parsed records have no cycles; looking for some in millions of objects takes most of the time.
    gc.disable()
    channel = socket.socket(fileno=int(sys.argv[1]))
    jobs: queue.SimpleQueue[tuple[bytes, list[int]]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(channel, jobs), daemon=True).start()
    stores: dict[str, Blobs] = {}
    while True:
        message, fds = jobs.get()
        outcome = _run(decode_job(message), fds, stores)
        leaving = _peak_bytes() > MAX_KEPT_BYTES
        try:
            send(channel, encode(Reply(outcome, leaving)), [])
        except ConnectionError:  # the parent died within the job: nobody waits for the answer
            return
        if leaving:
            return


def _listen(channel: socket.socket, jobs: queue.SimpleQueue[tuple[bytes, list[int]]]) -> None:
    try:
        while True:
            jobs.put(receive(channel))
    except (EOFError, OSError):
        os._exit(0)


def _run(job: Job, fds: list[int], stores: dict[str, Blobs]) -> Outcome:
    blobs = stores.get(job.storage.url)
    if blobs is None:
        blobs = stores[job.storage.url] = open_blobs(job.storage)
    try:
        if isinstance(job.work, Check):
            return check(blobs, job.work)
        with open(fds[0], "rb") as file:
            # Not closed by name: whoever failed in the middle of it may still hold it.
            body = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if isinstance(job.work, Open):
                return open_request(job.work, body)
            return lay_out(blobs, job.work, body)
    except BlobMissing:
        return Fault("missing")
    except UnsupportedEncoding:
        return Fault("utf16")
    except (TooManyRecords, TooManyItems):
        return Fault("too_many")
    except NotJson as error:
        return Fault("not_json", str(error))
    except Exception as error:
        if (why := why_failed(error)) is not None:
            return Fault("storage", why)
        raise


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main()
