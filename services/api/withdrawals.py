"""Taking back batches whose creation was not acknowledged in time.

The caller was told 503, so the batch must not run; but `created` may be in the log, or get there yet. So
`withdrawn` is appended behind it, by the same producer to the same partition, however long the broker takes.
Before that the log is looked at once more: when another attempt's `created` was first, the batch is that
attempt's and stays.
"""

from __future__ import annotations

import asyncio
import logging
import secrets

import msgspec

from schemas import topics
from schemas.facts import Created, FileDeleted, Withdrawn, batch_key
from schemas.ids import BatchId
from services.api.readmodel import ReadModel
from services.api.refusals import Refusal
from services.api.writing import FactWriter, Uncertain

RETRY_S = 2.0
LAST_MOMENT_S = 5.0

log = logging.getLogger("openrelay.api")


class Withdrawals:
    def __init__(self, model: ReadModel, facts: FactWriter, partitions: int) -> None:
        self._model = model
        self._facts = facts
        self._partitions = partitions
        self._running: dict[BatchId, asyncio.Task[None]] = {}

    def begin(self, created: Created, *, forget_input: bool) -> None:
        """Withdraw in the background; with `forget_input` the input file goes too."""
        task = asyncio.create_task(self._withdraw(created, forget_input))
        self._running[created.batch] = task
        task.add_done_callback(lambda _: self._running.pop(created.batch))

    def concerns(self, batch: BatchId) -> bool:
        """Whether what can be seen of the batch may be about to go."""
        return batch in self._running

    async def close(self) -> None:
        """Give those under way a last moment."""
        tasks = list(self._running.values())
        if tasks:
            await asyncio.wait(tasks, timeout=LAST_MOMENT_S)
        for task in tasks:
            task.cancel()

    async def _withdraw(self, created: Created, forget_input: bool) -> None:
        fact = Withdrawn(batch=created.batch)
        key = batch_key(fact, secrets.token_hex(8))
        partition = topics.partition_of(created.batch, self._partitions)
        while not await self._is_anothers(created):
            try:
                await self._facts.try_append(topics.BATCHES, key, msgspec.json.encode(fact), partition)
            except Uncertain:
                continue
            log.warning("withdrew %s, whose creation was not acknowledged", created.batch)
            break
        if forget_input:
            await self._forget(created)

    async def _is_anothers(self, created: Created) -> bool:
        """Whether another attempt created the batch; waits until the broker can tell."""
        while True:
            try:
                await self._model.barrier()
            except Refusal:
                await asyncio.sleep(RETRY_S)
                continue
            state = self._model.batch(created.batch)
            return state is not None and state.created is not None and state.created != created

    async def _forget(self, created: Created) -> None:
        file = created.input_file_id
        fact = FileDeleted(file=file, organization=created.organization)
        while True:
            try:
                await self._facts.try_append(topics.FILES, f"{file}:deleted", msgspec.json.encode(fact), 0)
                return
            except Uncertain:
                await asyncio.sleep(RETRY_S)
