"""When a role that ended is started again."""

from __future__ import annotations

import pytest

from services.embedded.child import MAX_DELAY_S, restart_delay_s


@pytest.mark.parametrize(("quick", "killed"), [(0, False), (0, True), (1, False), (1, True), (5, True)])
def test_the_first_deaths_are_answered_at_once(quick: int, killed: bool) -> None:
    assert restart_delay_s(quick, killed) == 0


def test_a_process_that_keeps_ending_by_itself_waits_longer_each_time() -> None:
    delays = [restart_delay_s(quick, killed=False) for quick in range(2, 9)]
    assert delays == sorted(delays)
    assert delays[0] == 0.5
    assert delays[-1] == MAX_DELAY_S


def test_even_kills_from_outside_are_not_answered_at_once_for_ever() -> None:
    assert restart_delay_s(6, killed=True) == 0.5
