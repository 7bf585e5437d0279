"""`orl batches create` that can be killed at any moment and started again without a second batch.

The first run writes down what it is about to do, under a name derived from the server, the key, the hash of
the input and the arguments; a run that finds such a note goes on where the other one stopped.

    1. upload the file         died before 2: nobody refers to the upload, it expires
    2. note file id and a new idempotency key
    3. create the batch        died before 4: the same request with the same key gives the same batch
    4. note the batch id
    5. wait, with --wait       died before 6: the next run waits for the noted batch
    6. remove the note         from here on the same command means a new batch

The server remembers a key for 24 hours; a note without a batch that is older than that is settled by
looking for a batch that was made from the noted file, which no other command can have used.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import platformdirs

from services.cli.client import Client, Exit, Refused, route

KEY_LIFE_S = 23 * 3600


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What an unfinished create left behind. `written_at` is Unix seconds."""

    input_file_id: str
    idempotency_key: str
    written_at: float
    batch_id: str | None = None


class Notes:
    """The note of one submission, if there is one."""

    def __init__(self, directory: Path, name: str) -> None:
        self._path = directory / f"{name}.json"

    def read(self) -> Note | None:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Note)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError:
            return None  # written by another version: nothing we could go on with

    def write(self, note: Note) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = self._path.with_suffix(f".{os.getpid()}")
        with partial.open("wb") as file:
            file.write(msgspec.json.encode(note))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self._path)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def notes(base_url: str, api_key: str, source: str, arguments: dict[str, Any]) -> Notes:
    """The note of the submission of `source` (a file's hash or an id) with `arguments`."""
    described = msgspec.json.encode([base_url, api_key, source, arguments], order="deterministic")
    name = hashlib.sha256(described).hexdigest()[:32]
    return Notes(platformdirs.user_state_path("openrelay") / "submissions", name)


class Submitted(msgspec.Struct, frozen=True):
    """The batch, and whether an earlier run of the command had submitted it."""

    batch: dict[str, Any]
    resumed: bool


def submit(client: Client, kept: Notes, arguments: dict[str, Any], upload: Callable[[], str]) -> Submitted:
    """Create the batch, or find the one that an earlier run created. The note stays; see `Notes.remove`."""
    note = kept.read()
    if note is not None:
        batch = _resume(client, note, arguments)
        if batch is not None:
            kept.write(msgspec.structs.replace(note, batch_id=batch["id"]))
            return Submitted(batch, True)
    note = Note(
        input_file_id=upload(),
        idempotency_key=f"orl-{secrets.token_hex(16)}",
        written_at=time.time(),
    )
    kept.write(note)
    try:
        batch = _create(client, note, arguments)
    except Refused as refused:
        if refused.exit_status is not Exit.NETWORK:
            kept.remove()
        raise
    kept.write(msgspec.structs.replace(note, batch_id=batch["id"]))
    return Submitted(batch, False)


def _create(client: Client, note: Note, arguments: dict[str, Any]) -> dict[str, Any]:
    body = {"input_file_id": note.input_file_id, **arguments}
    return client.post("/batches", body, idempotency_key=note.idempotency_key)


def _resume(client: Client, note: Note, arguments: dict[str, Any]) -> dict[str, Any] | None:
    """The batch of an earlier run; None if it never came to be and cannot any more."""
    try:
        if note.batch_id is not None:
            return client.get(route("batches", note.batch_id))
        if time.time() - note.written_at > KEY_LIFE_S:
            return _made_from(client, note)
        return _create(client, note, arguments)
    except Refused as refused:
        if refused.status in (400, 404, 409):
            return None
        raise


def _made_from(client: Client, note: Note) -> dict[str, Any] | None:
    after = None
    while True:
        page = client.get("/batches", limit=100, after=after)
        for batch in page["data"]:
            if batch["input_file_id"] == note.input_file_id:
                return dict(batch)
            if batch["created_at"] < note.written_at - 3600:
                return None
        if not page["has_more"]:
            return None
        after = page["last_id"]
