from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from schemas.ids import BatchId
from schemas.records import DoneSet
from streams.core import bitmap
from streams.core.extents import Positions, Run, RunBuilder, divisions, led, share, stripes
from streams.core.lanes import MOST_ATTEMPTS_KEPT, RESERVE, Lane

BATCH = BatchId("batch_x")


def lane(runs: list[Run], restored: DoneSet | None = None) -> Lane:
    return Lane(BATCH, "attempt", "requests.x", 0, runs, restored)


def read_all(one: Lane, most: int = 7) -> list[int]:
    seen = []
    while (span := one.next_read(most)) is not None:
        seen += [p for p in range(span[0], span[1] + 1) if not one.is_finished(p)]
    return seen


runs_of = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=8).map(
    lambda pairs: _runs(pairs)
)


def _runs(pairs: list[tuple[int, int]]) -> list[Run]:
    """Runs of the given lengths behind the given gaps."""
    runs, offset = [], 0
    for length, gap in pairs:
        offset += gap
        runs.append((offset, offset + length - 1))
        offset += length
    return runs


@given(runs_of)
def test_positions_and_offsets_are_inverse(runs: list[Run]) -> None:
    positions = Positions(runs)
    offsets = [o for first, last in runs for o in range(first, last + 1)]
    assert [positions.offset(p) for p in range(positions.count)] == offsets
    inside = set(offsets)
    for offset in range(runs[-1][1] + 3):
        found = positions.position(offset)
        assert (found is not None) == (offset in inside)
        if found is not None:
            assert positions.offset(found) == offset


@given(runs_of)
def test_a_builder_gives_the_runs_back(runs: list[Run]) -> None:
    builder = RunBuilder()
    for first, last in runs:
        for offset in range(first, last + 1):
            builder.add(3, offset)
    assert builder.build() == {3: runs}


@given(runs_of, st.integers(1, 10))
def test_every_position_is_read_once_and_never_across_a_gap(runs: list[Run], most: int) -> None:
    one = lane(runs)
    seen = []
    while (span := one.next_read(most)) is not None:
        first, last = span
        assert last - first < most
        assert one.positions.offset(last) - one.positions.offset(first) == last - first
        seen += range(first, last + 1)
    assert seen == list(range(one.positions.count))


@given(runs_of, st.data())
def test_a_restored_lane_reads_what_is_not_finished_suspects_first(
    runs: list[Run], data: st.DataObject
) -> None:
    before = lane(runs)
    count = before.positions.count
    started = data.draw(st.integers(0, count))
    finished = data.draw(st.sets(st.integers(0, max(0, started - 1)))) if started else set()
    for position in range(started):
        before.reserve(position)
        before.start(position)
    for position in finished:
        before.finish(position, 10)
    after = lane(runs, before.done_set(clean=False))
    seen = read_all(after)
    assert sorted(seen) == [p for p in range(count) if p not in finished]
    suspects = [p for p in range(before.started_upto) if p not in finished]
    assert seen[: len(suspects)] == suspects
    assert after.crashes == (1 if suspects else 0)


def test_reservations_come_early_and_cover_many() -> None:
    one = lane([(0, 999)])
    writes = sum(one.reserve(position) for position in range(1000))
    assert one.started_upto == 1000
    assert writes <= 2 * 1000 // RESERVE + 1


def test_a_clean_hand_over_is_no_crash() -> None:
    one = lane([(0, 99)])
    one.reserve(0)
    one.start(0)
    one.abandon(0)
    assert lane([(0, 99)], one.done_set(clean=True)).crashes == 0


def test_what_was_left_cleanly_counts_as_started_again_before_it_starts() -> None:
    """Else a record that kills its dispatcher after a hand-over would find a clean done-set each time."""
    one = lane([(0, 99)])
    one.reserve(0)
    one.start(0)
    one.abandon(0)
    second = lane([(0, 99)], one.done_set(clean=True))
    assert (second.started_upto > 0, second.acked_upto) == (True, 0)
    assert lane([(0, 99)], second.done_set(clean=False)).crashes == 1
    second.absorb(one.done_set(clean=True))
    assert second.acked_upto == 0


def test_a_clean_hand_over_keeps_the_count_and_who_is_given_up() -> None:
    runs = [(0, 99)]
    one = lane(runs)
    one.reserve(5)
    third = lane(runs, lane(runs, one.done_set(clean=False)).done_set(clean=False))
    third.probing = 5
    assert lane(runs, third.done_set(clean=True)).given_up is None, "it was stopped, and killed nobody"
    fourth = lane(runs, third.done_set(clean=False))
    for after in (lane(runs, fourth.done_set(clean=True)), lane(runs, fourth.done_set(clean=False))):
        assert (after.given_up, after.apart[0], after.careful) == (5, 5, True)
    after = lane(runs, fourth.done_set(clean=True))
    assert after.crashes == fourth.crashes
    after.finish(5, 1)
    assert after.given_up is None


def test_two_crashes_make_careful_and_a_third_gives_the_named_one_up() -> None:
    runs = [(0, 99)]
    one = lane(runs)
    one.reserve(5)
    one.start(5)
    second = lane(runs, one.done_set(clean=False))
    assert (second.crashes, second.careful) == (1, False)
    third = lane(runs, second.done_set(clean=False))
    assert (third.crashes, third.careful) == (2, True)
    third.probing = 5
    fourth = lane(runs, third.done_set(clean=False))
    assert fourth.given_up == 5
    assert fourth.next_read(100) == (fourth.started_upto, 99), "only what was not running is read"
    for position in list(fourth.apart):
        assert fourth.runs_alone(position)
        fourth.finish(position, 1)
    assert (fourth.crashes, fourth.careful) == (0, False)


def test_a_suspect_given_back_stays_apart_and_other_records_do_not() -> None:
    runs = [(0, 99)]
    one = lane(runs)
    one.reserve(5)
    third = lane(runs, lane(runs, one.done_set(clean=False)).done_set(clean=False))
    suspects = list(third.apart)
    first, last = third.next_read(10) or (0, 0)
    third.unread(first, last)
    position = third.apart.popleft()
    third.unread(position, position)
    assert list(third.apart) == suspects
    assert third.next_read(10) == (first, last)
    assert list(third.lost(range(first, last + 1))) == []


def test_a_lane_that_comes_back_takes_over_what_somebody_else_finished() -> None:
    runs = [(0, 99)]
    mine, other = lane(runs), lane(runs)
    for position in range(10):
        mine.reserve(position)
    mine.next_read(10)
    mine.finish(3, 1)
    for position in range(60):
        other.reserve(position)
        other.finish(position, 9)
    mine.absorb(other.done_set(clean=True))
    left = read_all(mine)
    assert set(left) == set(range(60, 100))


@given(st.integers(0, 500), st.integers(1, 24), st.data())
def test_shares_add_up_to_the_maximum(maximum: int, partitions: int, data: st.DataObject) -> None:
    owners = [data.draw(st.integers(0, 3)) for _ in range(partitions)]
    shares = [share(maximum, {p for p in range(partitions) if owners[p] == o}, partitions) for o in range(4)]
    assert sum(shares) == maximum


@given(st.integers(1, 24), st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_every_partition_is_in_one_division_and_that_has_a_slot_on_every_endpoint(
    partitions: int, maxima: list[int]
) -> None:
    parts = divisions(partitions, min(maxima))
    assert sorted(p for lead in range(partitions) for p in led(lead, partitions, parts)) == list(
        range(partitions)
    )
    for lead in range(partitions):
        has = [share(maximum, {lead}, parts) for maximum in maxima if led(lead, partitions, parts)]
        assert all(has)
    if min(maxima) >= partitions:
        assert all(list(led(p, partitions, parts)) == [p] for p in range(partitions))


@given(st.integers(1, 50_000), st.integers(1, 16), st.integers(0, 15))
def test_small_batches_touch_few_partitions(records: int, partitions: int, first: int) -> None:
    chosen = stripes(records, partitions, first)
    assert len(chosen) == len(set(chosen)) == min(partitions, -(-records // 16))


@given(st.sets(st.integers(0, 200)), st.integers(0, 210), st.integers(0, 210))
def test_unset_bits(bits: set[int], size: int, start: int) -> None:
    made = bitmap.empty(201)
    for bit in bits:
        bitmap.set_bit(made, bit)
    assert list(bitmap.unset(made, size, start)) == [b for b in range(start, size) if b not in bits]
    assert bitmap.count(made) == len(bits)
    assert bitmap.first_unset(made, size) == next((b for b in range(size) if b not in bits), size)


@given(st.integers(1, 60), st.data())
def test_whatever_is_given_back_is_read_once_more_and_nothing_else(count: int, data: st.DataObject) -> None:
    """Reads fail and records are put back, in any order, while others run or are finished."""
    one = lane([(0, count - 1)])
    out: set[int] = set()
    for _ in range(data.draw(st.integers(1, 30))):
        span = one.next_read(data.draw(st.integers(1, 9)))
        if span is not None:
            first, last = span
            assert first <= last
            read = {p for p in range(first, last + 1) if not one.is_finished(p)}
            assert not read & out, "a record that is under way is not read again"
            out |= read
        for position in data.draw(st.lists(st.sampled_from(sorted(out)), unique=True)) if out else []:
            out.discard(position)
            if data.draw(st.booleans()):
                one.finish(position, 1)
            else:
                one.unread(position, position)
    left = set(read_all(one))
    assert left | out == {p for p in range(count) if not one.is_finished(p)}
    assert not left & out


@given(st.integers(1, 90), st.data())
def test_a_lane_that_comes_back_reads_everything_that_is_left_once(count: int, data: st.DataObject) -> None:
    """However far it had read and reserved, and whatever somebody else has started and finished since."""
    mine, other = lane([(0, count - 1)]), lane([(0, count - 1)])
    out: set[int] = set()
    for _ in range(data.draw(st.integers(0, 5))):
        span = mine.next_read(data.draw(st.integers(1, 20)))
        out |= set(range(span[0], span[1] + 1)) if span is not None else set()
    positions = st.sampled_from(sorted(out)) if out else st.nothing()
    for position in data.draw(st.lists(positions, unique=True)):
        mine.reserve(position)
        if data.draw(st.booleans()):
            mine.finish(position, 1)
            out.discard(position)
    for position in data.draw(st.lists(st.integers(0, count - 1), unique=True)):
        other.reserve(position)
        if data.draw(st.booleans()):
            other.finish(position, 1)
    returned = data.draw(st.lists(positions, unique=True))
    for position in returned:
        if not mine.is_finished(position):
            mine.unread(position, position)
            out.discard(position)
    mine.absorb(other.done_set(clean=data.draw(st.booleans())))
    left = read_all(mine)
    assert len(left) == len(set(left))
    assert not set(left) & out, "a record that is under way is not read again"
    assert set(left) | out >= {p for p in range(count) if not mine.is_finished(p)}


@given(
    st.integers(1, 60), st.lists(st.tuples(st.integers(0, 59), st.booleans())), st.booleans(), st.booleans()
)
def test_failed_attempts_stay_counted_whoever_runs_the_record_next(
    count: int, calls: list[tuple[int, bool]], parked: bool, clean: bool
) -> None:
    """Until the record is finished; also when a lane comes back whose records others have tried meanwhile."""
    one, before = lane([(0, count - 1)]), lane([(0, count - 1)])
    counted: dict[int, int] = {}
    for position, failed in calls:
        if position >= count or one.is_finished(position):
            continue
        one.reserve(position)
        if failed:
            counted[position] = counted.get(position, 0) + 1
            one.failed(position, counted[position])
        else:
            one.finish(position, 1)
            counted.pop(position, None)
    done = one.done_set(clean=clean)
    assert done.attempts == counted
    assert lane([(0, count - 1)], done).attempts == counted
    if parked:
        before.failed(0, 9)
        before.absorb(done)
        assert before.attempts == counted | ({} if before.is_finished(0) else {0: 9})


def test_of_very_many_failed_records_the_most_tried_are_written_down() -> None:
    many = 2 * MOST_ATTEMPTS_KEPT
    one = lane([(0, many - 1)])
    for position in range(many):
        one.failed(position, 1 + position % 4)
    kept = one.done_set(clean=False).attempts
    assert len(kept) == MOST_ATTEMPTS_KEPT
    assert min(kept.values()) == 3
