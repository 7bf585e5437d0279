"""Steps of workflows in a lane: where the next owner must begin to read, and where it goes on."""

from __future__ import annotations

from schemas.ids import BatchId
from schemas.records import Step
from streams.core.lanes import Lane


def lane() -> Lane:
    return Lane(BatchId("b"), "a", "requests.m", 0, [(0, 9)], None)


def step(position: int, number: int, requests: int = 0) -> Step:
    return Step(
        batch=BatchId("b"),
        index=position,
        custom_id="r",
        origin=(0, position),
        step=number,
        requests=requests,
        billed=[],
    )


def test_the_done_set_says_where_the_first_step_of_an_unfinished_record_lies() -> None:
    here = lane()
    assert here.done_set(clean=False).steps_from is None
    here.wrote_step(3, 70)
    here.wrote_step(2, 60)
    here.wrote_step(2, 90)
    assert here.done_set(clean=False).steps_from == 60
    here.finish(2, 100)
    assert here.done_set(clean=False).steps_from == 70
    here.finish(3, 110)
    assert here.done_set(clean=False).steps_from is None


def test_the_first_of_a_number_holds_and_the_last_number_is_gone_on_from() -> None:
    here = lane()
    here.restore_step(step(4, 1, requests=1), 50)
    here.restore_step(step(4, 2, requests=2), 51)
    here.restore_step(step(4, 2, requests=99), 52)
    here.restore_step(step(4, 1, requests=99), 53)
    assert here.steps == {4: step(4, 2, requests=2)}
    assert here.done_set(clean=False).steps_from == 50


def test_finished_records_have_no_steps() -> None:
    here = lane()
    here.finish(5, 10)
    here.restore_step(step(5, 1), 5)
    here.wrote_step(5, 6)
    assert not here.steps
    assert here.done_set(clean=False).steps_from is None
    here.restore_step(step(6, 1), 7)
    here.finish(6, 11)
    assert not here.steps
