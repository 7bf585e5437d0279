"""Who reads a file as input: a create under way, or the batch that came of it.

A delete answered 200 must not overlap a create that succeeds, whichever instances they run on. Both write to
the one partition of `files`:

 1. a create appends `used`, before it copies its input. Dying here or later leaves a use that stops counting
    after `USE_COUNTS_S`; a living create has given up before.
 2. Once the records are judged it looks again: a deletion that was first makes its answer 404.
 3. A create that comes to nothing appends `released`.

A deletion names the offset up to which its author knew all uses, and does not hold if there was another one
before it (`streams.core.deletion`); then its author looks again, and finds the batch.
"""

from __future__ import annotations

import contextlib
import time

import msgspec

from schemas import topics
from schemas.facts import FileDeleted, FileReleased, FileUsed
from schemas.ids import BatchId, FileId
from services.api import refusals
from services.api.readmodel import FileRow, ReadModel
from services.api.writing import FactWriter, Uncertain

USE_COUNTS_S = 900.0
CREATE_LASTS_S = 600.0
"""Shorter by more than the clocks of two machines differ and an append takes."""


class Use:
    """One create's reading of a file, from now."""

    def __init__(self, file: FileId, batch: BatchId, attempt: str) -> None:
        self.fact = FileUsed(file=file, batch=batch, attempt=attempt)
        self.begun: bool | None = False
        """Whether it is in the log; None: perhaps."""
        self._until_s = time.monotonic() + CREATE_LASTS_S

    def check(self) -> None:
        """503 when so much time has passed that nobody may count with this create any more."""
        if time.monotonic() > self._until_s:
            raise refusals.unavailable()


class Uses:
    def __init__(self, model: ReadModel, facts: FactWriter) -> None:
        self._model = model
        self._facts = facts

    async def begin(self, use: Use) -> None:
        """Use a file that exists: every later look at its uses finds this one."""
        use.begun = None
        await self._facts.append(topics.FILES, _key(use), msgspec.json.encode(use.fact), 0)
        use.begun = True

    def announce(self, use: Use) -> None:
        """Use a file that is about to be stored: whoever sees `stored`, appended after this, sees the use."""
        self._facts.mention(topics.FILES, _key(use), msgspec.json.encode(use.fact), 0)
        use.begun = True

    async def confirm(self, use: Use) -> None:
        """404 when the file was deleted before it was used."""
        await self._model.barrier()
        row = self._model.file(use.fact.file)
        if row is None or row.deleted:
            raise refusals.not_found()
        use.check()

    async def release(self, use: Use) -> None:
        """The create came to nothing. Lost, it is as if its process had died."""
        if use.begun is False:
            return
        fact = FileReleased(file=use.fact.file, attempt=use.fact.attempt)
        key, value = f"{fact.file}:released:{fact.attempt}", msgspec.json.encode(fact)
        if use.begun is None:  # the broker does not answer; the caller need not wait for it once more
            self._facts.mention(topics.FILES, key, value, 0)
            return
        with contextlib.suppress(Uncertain):
            await self._facts.try_append(topics.FILES, key, value, 0)

    async def delete(self, row: FileRow, attempt: str) -> BatchId | None:
        """Delete a file, or else the batch that has it for its input. The caller has passed the barrier."""
        number = 0
        while True:
            # The offset first: whatever is applied after it only makes the deletion more careful.
            seen = self._model.files_applied()
            if batch := self._user(row):
                return batch
            fact = FileDeleted(file=row.id, organization=row.organization, seen=seen)
            key = f"{row.id}:deleted:{attempt}{number}"
            await self._facts.append(topics.FILES, key, msgspec.json.encode(fact), 0)
            await self._model.barrier()
            now = self._model.file(row.id)
            if now is None or now.deleted:
                return None
            number += 1

    def _user(self, row: FileRow) -> BatchId | None:
        batch = self._model.open_batch_of(row.organization, row.id)
        if batch is not None:
            return batch
        since_ms = time.time_ns() // 1_000_000 - round(USE_COUNTS_S * 1000)
        for batch in self._model.uses(row.id, since_ms):
            state = self._model.batch(batch)
            if state is None or (state.created is None and not state.withdrawn):
                return batch
        return None


def _key(use: Use) -> str:
    return f"{use.fact.file}:used:{use.fact.attempt}"
