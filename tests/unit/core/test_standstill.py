"""Suspects and everybody else take turns: neither is held up for long, and nothing is named beside others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streams.core.standstill import (
    CAREFUL_AFTER,
    LATER_PATIENCE_S,
    PATIENCE_S,
    TURN_S,
    Standstill,
    patience_s,
)

LIMIT_S = 1_800.0
LOOK_S = 0.05
seconds = st.floats(0.01, 4 * PATIENCE_S)


@given(st.lists(st.tuples(seconds, st.lists(seconds, min_size=1)), min_size=1, max_size=30))
def test_others_that_wait_have_half_of_the_time(turns: list[tuple[float, list[float]]]) -> None:
    """`turns`: how long what runs needs to end, and how long each suspect runs. Others wait all the time."""
    standstill, now, held, stood_at = Standstill(), 0.0, 0.0, 0.0
    patience = patience_s(CAREFUL_AFTER, LIMIT_S)
    for clearing, suspects in turns:
        waited = now
        while not standstill.due(now, others_wait=True):
            assert not standstill
            now += LOOK_S
        assert now - waited <= 2 * patience + 2 * LOOK_S, "the suspects have their turns as well"
        standstill.begin(now)
        stood_at = now
        now += min(clearing, patience)
        for suspect in suspects:
            now += min(suspect, patience)
            assert standstill
            if standstill.over(now):
                break
        standstill.end(now)
        assert now - stood_at <= 2 * patience + 1e-6, "a turn is bounded"
        held += now - stood_at
    assert held - (now - stood_at) <= now / 2 + 1e-6


def test_while_nobody_waits_the_suspects_need_not_either() -> None:
    standstill = Standstill()
    standstill.begin(0.0)
    assert not standstill.due(0.1, others_wait=False), "one turn at a time"
    standstill.end(0.1)
    assert not standstill.due(0.1, others_wait=True)
    assert standstill.due(0.1, others_wait=False)
    assert standstill.due(0.1 + TURN_S, others_wait=True)


@given(st.integers(0, 1_000), st.floats(1.0, 86_400.0))
def test_patience_grows_with_crashes_up_to_a_minute_or_the_longest_call(crashes: int, limit_s: float) -> None:
    assert patience_s(CAREFUL_AFTER, limit_s) == min(PATIENCE_S, limit_s)
    assert patience_s(crashes, limit_s) <= patience_s(crashes + 1, limit_s) <= limit_s
    assert patience_s(CAREFUL_AFTER + 10, limit_s) == min(LATER_PATIENCE_S, limit_s)
