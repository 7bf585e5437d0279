"""A search over schedules: batches come and are cancelled while roles are killed, stopped, woken, restarted.

The model is small: every batch ends, whole, and cancelled only if somebody asked. Few steps with fixed seeds
here; `make test-faults FAULTS='--hypothesis-profile=long'` searches for as long as you like.
"""

from __future__ import annotations

import signal
import time
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from schemas.batches import Status
from schemas.ids import BatchId
from streams.core.lifecycle import terminal_status
from tests.stages.conftest import LIMITS, MakePipeline
from tests.support.check import check_batch, check_ledger
from tests.support.pipeline import Pipeline, record
from tests.support.simulator import Simulator
from tests.support.until import until
from tests.support.warehouse import EmbeddedWarehouse

pytestmark = [pytest.mark.faults, pytest.mark.timeout(3600)]

ROLES = ("dispatch", "dispatch-2", "settle", "settle-2", "sink", "meter")
roles = st.sampled_from(ROLES)


class Schedules(RuleBasedStateMachine):
    make: ClassVar[MakePipeline]
    tables: ClassVar[EmbeddedWarehouse]

    def __init__(self) -> None:
        super().__init__()
        self.stages: Pipeline = type(self).make(LIMITS)
        self.batches: dict[BatchId, int] = {}
        self.cancelled: set[BatchId] = set()
        self.stopped: set[str] = set()

    @initialize()
    def start(self) -> None:
        self.stages.start("intake", *ROLES)

    @rule(count=st.integers(1, 300))
    def create(self, count: int) -> None:
        batch = self.stages.create(record(f"r{i}", f"usage:{i % 5}/1 any {i}") for i in range(count))
        self.batches[batch] = count

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from(list(self.batches)))
        self.stages.cancel(batch)
        self.cancelled.add(batch)

    @rule(role=roles)
    def kill_and_restart(self, role: str) -> None:
        if role in self.stages.children:
            self.stages.kill(role)
        self.stopped.discard(role)
        self.stages.start(role)

    @rule(role=roles)
    def stop(self, role: str) -> None:
        if self._alive(role):
            self.stages.signal(role, signal.SIGSTOP)
            self.stopped.add(role)

    @rule(role=roles)
    def wake(self, role: str) -> None:
        if role in self.stopped and self._alive(role):
            self.stages.signal(role, signal.SIGCONT)
        self.stopped.discard(role)

    @rule(seconds=st.sampled_from([0.1, 0.5, 2.0, 7.0]))
    def let_time_pass(self, seconds: float) -> None:
        time.sleep(seconds)  # part of the schedule: 7 s is longer than a session

    def teardown(self) -> None:
        try:
            for role in list(self.stopped):
                self.wake(role)
            for batch, count in self.batches.items():
                until(
                    lambda batch=batch: self._ended(batch),
                    180,
                    lambda batch=batch: self.stages.explain(batch),
                )  # type: ignore[misc]
                state = self.stages.state(batch)
                output, error = self.stages.lines(batch, "output"), self.stages.lines(batch, "error")
                check_batch(state, [f"r{i}" for i in range(count)], output, error)
                status = terminal_status(state)
                assert status is Status.COMPLETED or batch in self.cancelled
                self._check_bill(batch)
        finally:
            self.stages.close()

    def _alive(self, role: str) -> bool:
        return role in self.stages.children and self.stages.children[role].poll() is None

    def _ended(self, batch: BatchId) -> bool:
        """Whether it has; roles that ended, because a successor fenced them, are started again meanwhile."""
        return self.stages.revived() and self.stages.state(batch).ended is not None

    def _check_bill(self, batch: BatchId) -> None:
        state = self.stages.state(batch)
        assert state.settled is not None
        billed = state.settled.usage.billed_records
        client = type(self).tables.client()
        try:
            until(
                lambda: (
                    self._ended(batch)
                    and client.query(
                        f"SELECT count() FROM billing.usage WHERE batch_id = '{batch}'"
                    ).first_row[0]
                    >= billed
                ),
                90,
                lambda: f"rows are missing\n{self.stages.tail('meter')}",
            )
            check_ledger(client, state)
        finally:
            client.close()


def test_any_schedule(pipeline: MakePipeline, simulator: Simulator, tables: EmbeddedWarehouse) -> None:
    simulator.control(latency_ms=5)
    Schedules.make = staticmethod(pipeline)  # type: ignore[assignment]
    Schedules.tables = tables
    profile = settings.get_profile(settings.get_current_profile_name())
    long = settings.get_current_profile_name() == "long"
    chosen = settings(
        profile,
        max_examples=profile.max_examples if long else 4,
        stateful_step_count=profile.stateful_step_count if long else 10,
        derandomize=not long,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    run_state_machine_as_test(Schedules, settings=chosen)
