"""Records that are forgotten or passed over are found, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterable

from schemas.ids import BatchId
from streams.core.lanes import Lane
from streams.core.stuck import LOST, PASSED_OVER, RUNS_ALONE, UNSERVED, Sight, Stuck, StuckDetector

AFTER_S = 10.0
BATCH = BatchId("batch_1")


def lane(records: int = 20, partition: int = 3) -> Lane:
    return Lane(BATCH, "a", "requests.m", partition, [(100, 100 + records - 1)], None)


def look(
    detector: StuckDetector, one: Lane, now: float, waiting: Iterable[int] = (), could: bool = False
) -> list[Stuck]:
    return detector.look([Sight(one, frozenset(waiting), could)], now, AFTER_S)


def test_a_record_that_was_read_and_forgotten_is_lost() -> None:
    detector, one = StuckDetector(), lane()
    assert one.next_read(8) == (0, 7)
    for position in (0, 1, 2):
        one.start(position)
    one.finish(1, 500)
    one.abandon(2)
    waiting = {2, 3, 4, 5, 7}
    assert look(detector, one, 0.0, waiting) == []
    assert look(detector, one, AFTER_S, waiting) == []
    [stuck] = look(detector, one, AFTER_S + 1, waiting)
    assert (stuck.batch, stuck.partition, stuck.position, stuck.reason) == (BATCH, 3, 6, LOST)
    assert stuck.seconds == AFTER_S + 1


def test_a_record_that_is_found_again_in_between_is_not_lost() -> None:
    detector, one = StuckDetector(), lane()
    one.next_read(1)
    look(detector, one, 0.0)
    look(detector, one, 8.0, {0})
    assert look(detector, one, 16.0) == []
    assert look(detector, one, 25.0) == []
    assert [stuck.position for stuck in look(detector, one, 26.1)] == [0]


def test_a_read_given_back_is_not_lost() -> None:
    detector, one = StuckDetector(), lane()
    one.next_read(4)
    one.unread(0, 3)
    assert list(one.lost(())) == []
    assert one.next_unread == 0
    assert one.unread_count == 20
    assert look(detector, one, 0.0) == look(detector, one, 100.0) == []


def test_what_runs_alone_is_not_lost_between_two_tries() -> None:
    one = lane()
    one.next_read(1)
    one.probing = 0
    assert list(one.lost(())) == []


def test_a_lane_that_starts_nothing_though_it_could_is_passed_over() -> None:
    detector, one = StuckDetector(), lane()
    one.next_read(2)
    assert look(detector, one, 0.0, {0, 1}, could=True) == []
    assert look(detector, one, 10.0, {0, 1}, could=True) == []
    [stuck] = look(detector, one, 10.5, {0, 1}, could=True)
    assert stuck == Stuck(BATCH, 3, 0, 20, 10.5, PASSED_OVER)
    one.start(0)
    assert look(detector, one, 11.0, {1}, could=True) == []
    assert look(detector, one, 21.0, {1}, could=True) == []
    assert [each.position for each in look(detector, one, 22.0, {1}, could=True)] == [1]


def test_waiting_for_a_slot_is_no_fault_however_long() -> None:
    detector, one = StuckDetector(), lane()
    one.next_read(5)
    waiting = {0, 1, 2, 3, 4}
    assert look(detector, one, 0.0, waiting, could=True) == []
    assert look(detector, one, 9.0, waiting, could=False) == []
    assert look(detector, one, 18.0, waiting, could=True) == []
    assert look(detector, one, 27.0, waiting, could=True) == []
    assert look(detector, one, 10_000.0, waiting, could=False) == []


def test_a_lane_with_nothing_left_to_start_is_at_rest() -> None:
    detector, one = StuckDetector(), lane(2)
    one.next_read(2)
    one.start(0)
    one.start(1)
    one.finish(0, 1)
    assert look(detector, one, 0.0, could=True) == []
    assert look(detector, one, 10_000.0, could=True) == []


def test_lanes_that_are_no_longer_seen_are_forgotten() -> None:
    detector, one = StuckDetector(), lane()
    one.next_read(1)
    look(detector, one, 0.0)
    assert detector.look([], 5.0, AFTER_S) == []
    assert look(detector, one, 11.0) == []


def test_suspects_that_never_get_to_run_alone_are_named_with_the_reason() -> None:
    before = lane()
    before.reserve(3)
    runs = [(100, 119)]
    for _ in range(2):
        before = Lane(BATCH, "a", "requests.m", 3, runs, before.done_set(clean=False))
    while before.next_read(20) is not None:
        pass
    others = set(range(before.started_upto, 20))
    detector = StuckDetector()
    for position in others:
        before.start(position)
        before.finish(position, 1)
    assert look(detector, before, 0.0, could=False) == look(detector, before, 100.0, could=False) == []
    assert look(detector, before, 100.0, could=True) == []
    assert look(detector, before, 111.0, could=True) == [
        Stuck(BATCH, 3, 0, before.started_upto, 11.0, RUNS_ALONE)
    ]


def test_records_of_a_model_without_servers_are_stuck() -> None:
    """Whether they were read or not; those of one whose servers are busy or out are not."""
    detector, one = StuckDetector(), lane()
    one.next_read(8)
    for now in (0.0, AFTER_S + 1):
        found = detector.look(
            [Sight(one, frozenset(range(8)), could_start=False, served=False)], now, AFTER_S
        )
    assert [(each.position, each.records, each.reason) for each in found] == [(0, 20, UNSERVED)]
    for now in (0.0, AFTER_S + 1):
        assert StuckDetector().look([Sight(one, frozenset(range(8)), could_start=False)], now, AFTER_S) == []
