from __future__ import annotations

from schemas.settings import Pool
from streams.core.judge import Server
from streams.pools.endpoint import Endpoint
from streams.pools.pool import ModelPool, Slot

URL, OTHER = "http://one/v1", "http://other/v1"


def pool(slots: int, url: str = URL, **fields: str) -> Pool:
    return Pool(base_url=url, max_concurrency=slots, **fields)


def whole(*pools: Pool) -> ModelPool:
    """A model's pool as its only dispatcher has it."""
    made = ModelPool("m", pools)
    made.own(frozenset({0}), 1)
    return made


def take(model: ModelPool, count: int) -> list[Slot]:
    slots = [model.acquire(0.0) for _ in range(count)]
    assert None not in slots
    return [slot for slot in slots if slot is not None]


def test_running_calls_count_against_a_new_limit() -> None:
    model = whole(pool(8))
    held = take(model, 8)
    model.configure((pool(3),))
    assert model.acquire(0.0) is None
    for slot in held[:5]:
        slot.release()
    assert model.free(0.0) == 0
    held[5].release()
    assert model.free(0.0) == 1
    model.configure((pool(10),))
    assert model.free(0.0) == 8


def test_a_server_that_leaves_and_comes_back_has_its_running_calls_still() -> None:
    model = whole(pool(4), pool(4, OTHER))
    take(model, 8)
    model.configure((pool(4, OTHER),))
    assert model.free(0.0) == 0
    assert {endpoint.base_url for endpoint in model.busy} == {URL, OTHER}
    model.configure((pool(5), pool(4, OTHER)))
    assert model.free(0.0) == 1


def test_one_server_named_twice_is_two_endpoints() -> None:
    model = whole(pool(1), pool(2), pool(4, model="alias"))
    assert model.free(0.0) == 7
    model.configure((pool(1), pool(2), pool(4, model="alias")))
    assert model.free(0.0) == 7
    assert model.least_slots == 1


def test_another_key_is_tried_at_once() -> None:
    model = whole(pool(4, api_key="old"))
    [endpoint] = model.endpoints
    endpoint.report(Server.MISCONFIGURED, sent_at=0.0, now=1.0, alone=True)
    assert model.acquire(1.1) is None
    model.configure((pool(4, api_key="old"),))
    assert model.acquire(1.1) is None
    model.configure((pool(4, api_key="new"),))
    slot = model.acquire(1.1)
    assert slot is not None
    assert slot.endpoint.headers == {"Authorization": "Bearer new"}


def test_shares_of_few_slots() -> None:
    """Two dispatchers with a division each have a slot on every endpoint, and together all there are."""
    mine, theirs = ModelPool("m", (pool(2), pool(5, OTHER))), ModelPool("m", (pool(2), pool(5, OTHER)))
    mine.own(frozenset({0}), 2)
    theirs.own(frozenset({1}), 2)
    shares = [[endpoint.limit.maximum for endpoint in model.endpoints] for model in (mine, theirs)]
    assert [sum(each) for each in zip(*shares, strict=True)] == [2, 5]
    assert min(min(each) for each in shares) >= 1


def refuse(endpoint: Endpoint, at: float, retry_after_s: float | None = None) -> None:
    endpoint.report(Server.REFUSING, sent_at=at, now=at + 0.01, alone=True, retry_after_s=retry_after_s)


def test_a_server_that_refuses_again_and_again_has_the_time_it_asks_for() -> None:
    model = whole(pool(8))
    [endpoint] = model.endpoints
    refuse(endpoint, 1.0, 5.0)
    assert model.free(1.1) == 5, "one cohort only shortens the limit"
    endpoint.report(Server.REFUSING, sent_at=0.5, now=1.1, alone=True, retry_after_s=5.0)
    assert model.free(1.2) == 5, "it was in flight with the first"
    refuse(endpoint, 1.2, 5.0)
    assert model.free(1.3) == 0
    assert model.free(6.2) == 0
    assert model.free(6.3) == 1
    refuse(endpoint, 6.3, 0.0)
    assert model.free(6.4) == 0, "no time is asked for, and a little is given"
    assert model.free(8.0) == 1


def test_a_good_answer_in_between_keeps_it_in_service() -> None:
    model = whole(pool(8))
    [endpoint] = model.endpoints
    for second in range(1, 20):
        refuse(endpoint, second, 600.0)
        endpoint.report(Server.GOOD, sent_at=second, now=second + 0.5, alone=True)
    assert model.free(20.0) >= 1


def test_nobody_waits_an_hour_for_one_answer() -> None:
    model = whole(pool(8))
    [endpoint] = model.endpoints
    refuse(endpoint, 1.0, 3_600.0)
    refuse(endpoint, 2.0, 3_600.0)
    assert model.free(61.0) == 0
    assert model.free(62.1) == 1


def test_others_are_those_in_service_with_slots() -> None:
    model = whole(pool(8), pool(8, OTHER))
    one, other = model.endpoints
    assert model.has_other(one, 0.0)
    other.put_out(0.0)
    assert not model.has_other(one, 0.1)
    assert model.has_other(other, 0.1)
    other.try_again(0.2)
    assert model.has_other(one, 0.2)
    other.limit.resize(0)
    assert not model.has_other(one, 0.3)


def test_what_is_out_may_be_kept_out() -> None:
    model = whole(pool(8))
    [endpoint] = model.endpoints
    endpoint.put_out(0.0)
    endpoint.put_out(0.1, 9.0)
    assert model.free(9.0) == 0
    endpoint.put_out(0.2, 1.0)
    assert model.free(9.0) == 0, "not for less"
    assert model.free(9.2) == 1
