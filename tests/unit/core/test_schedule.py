from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from schemas.facts import Priority
from schemas.ids import BatchId, OrganizationId
from streams.core.schedule import FairQueue, Schedule

FAR = 10**15


def schedule(*batches: tuple[str, str, Priority], weights: dict[str, float] | None = None) -> Schedule:
    made = Schedule()
    for batch, organization, priority in batches:
        made.add(
            BatchId(batch),
            OrganizationId(organization),
            priority,
            weight=(weights or {}).get(organization, 1.0),
            expires_at_ms=FAR,
            urgent_at_ms=FAR,
        )
        made.set_ready(BatchId(batch), True)
    return made


def serve(made: Schedule, slots: int, tokens: float = 100.0, now_ms: int = 0) -> Counter[str]:
    served: Counter[str] = Counter()
    for _ in range(slots):
        batch = made.pick(now_ms)
        assert batch is not None
        made.charge(batch, tokens, now_ms)
        served[batch] += 1
    return served


STANDARD, EXPEDITED = Priority.STANDARD, Priority.EXPEDITED


def test_ten_batches_of_one_organization_do_not_hide_one_of_another() -> None:
    made = schedule(*((f"a{i}", "a", STANDARD) for i in range(10)), ("b", "b", STANDARD))
    served = serve(made, 1000)
    assert served["b"] == 500
    assert all(49 <= served[f"a{i}"] <= 51 for i in range(10))


def test_weights_divide_the_slots() -> None:
    made = schedule(("a", "a", STANDARD), ("b", "b", STANDARD), weights={"a": 3.0})
    served = serve(made, 400)
    assert abs(served["a"] - 300) <= 1


def test_standard_keeps_one_slot_in_ten() -> None:
    made = schedule(("fast", "a", EXPEDITED), ("slow", "b", STANDARD))
    assert serve(made, 1000)["slow"] == 100


def test_standard_takes_what_expedited_leaves() -> None:
    made = schedule(("fast", "a", EXPEDITED), ("slow", "b", STANDARD))
    made.set_ready(BatchId("fast"), False)
    assert serve(made, 10) == {"slow": 10}


def test_who_was_idle_does_not_catch_up() -> None:
    made = schedule(("a", "a", STANDARD), ("b", "b", STANDARD))
    made.set_ready(BatchId("b"), False)
    serve(made, 1000)
    made.set_ready(BatchId("b"), True)
    assert serve(made, 100)["b"] in (50, 51)


def test_a_near_deadline_takes_every_second_slot() -> None:
    made = schedule(*((f"a{i}", "a", STANDARD) for i in range(10)))
    made.add(
        BatchId("late"), OrganizationId("a"), STANDARD, weight=1.0, expires_at_ms=2_000, urgent_at_ms=1_000
    )
    made.set_ready(BatchId("late"), True)
    assert serve(made, 100, now_ms=500)["late"] < 15
    assert serve(made, 100, now_ms=1_500)["late"] >= 50


def test_removed_batches_are_never_picked() -> None:
    made = schedule(("a", "a", STANDARD), ("b", "a", STANDARD))
    made.remove(BatchId("a"))
    assert serve(made, 5) == {"b": 5}
    made.remove(BatchId("b"))
    assert made.pick(0) is None


@given(
    st.lists(st.floats(0.5, 8.0), min_size=2, max_size=6),
    st.lists(st.integers(1, 500), min_size=200, max_size=400),
)
def test_service_is_proportional_to_weight(weights: list[float], sizes: list[int]) -> None:
    """At any time, no two that were always ready differ by more than one piece each."""
    queue: FairQueue[int] = FairQueue()
    for item, weight in enumerate(weights):
        queue.add(item, weight)
        queue.set_ready(item, True)
    service = [0.0] * len(weights)
    for size in sizes:
        item = queue.peek()
        assert item is not None
        queue.charge(item, float(size))
        service[item] += size
        shares = [given / weight for given, weight in zip(service, weights, strict=True)]
        assert max(shares) - min(shares) <= 500 / min(weights) + 1e-6


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=200))
def test_only_ready_items_are_picked(changes: list[tuple[int, bool]]) -> None:
    queue: FairQueue[int] = FairQueue()
    for item in range(6):
        queue.add(item, 1.0)
    ready: set[int] = set()
    for item, now_ready in changes:
        queue.set_ready(item, now_ready)
        (ready.add if now_ready else ready.discard)(item)
        found = queue.peek()
        assert (found is None) == (not ready)
        if found is not None:
            assert found in ready
            queue.charge(found, 10.0)
