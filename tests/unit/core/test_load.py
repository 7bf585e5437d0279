from __future__ import annotations

import time

import pytest

from streams.core.limits import Limit
from streams.core.load import Load, parse
from tests.support.until import SLACK_S

EXPOSITION = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a"} 12.0
vllm:num_requests_running{engine="1",model_name="a"} 3.0
vllm:num_requests_waiting{engine="0",model_name="a"} 40.0
vllm:kv_cache_usage_perc{engine="0",model_name="a"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="a"} 0.75
vllm:num_preemptions_total{engine="0",model_name="a"} 2.0
vllm:num_preemptions_created{engine="0",model_name="a"} 1.7e+09
python_gc_objects_collected_total{generation="0"} 1.0
"""


def test_engines_add_up() -> None:
    assert parse(EXPOSITION) == Load(running=15, waiting=40, cache=0.75, preemptions=2)


def test_other_servers_have_no_load() -> None:
    assert parse("up 1\nprocess_open_fds 7\n") is None
    assert parse("") is None


@pytest.mark.parametrize(
    "said", ["1e999", "-1", "-100", "NaN", "+Inf", "-Inf", "1e300", "9" * 400, "1_0", "x"]
)
def test_what_is_no_count_makes_the_load_unknown(said: str) -> None:
    running = f"vllm:num_requests_running {said}\n"
    waiting = "vllm:num_requests_waiting 1\n"
    assert parse(running + waiting) is None
    assert parse(running + running.replace(said, "7") + waiting) is None, "of one engine is enough"


def test_a_cache_or_preemptions_that_are_none_count_as_untold() -> None:
    text = "vllm:num_requests_running 1\nvllm:num_requests_waiting 2\n"
    text += "vllm:kv_cache_usage_perc NaN\nvllm:num_preemptions_total -1\nvllm:num_preemptions_total 5\n"
    assert parse(text) == Load(running=1, waiting=2, cache=0.0, preemptions=0)
    assert parse(text + "vllm:kv_cache_usage_perc 1.5\n") == Load(1, 2, 1.0, 0)


def test_labels_may_hold_anything() -> None:
    labels = r'{a="}",b="\" 7",c=""}'
    text = f"vllm:num_requests_running{labels} 1 1700000000\nvllm:num_requests_waiting\t 2\r\n"
    assert parse(text) == Load(running=1, waiting=2, cache=0.0, preemptions=0)


def test_labels_without_an_end_take_no_time() -> None:
    line = 'vllm:num_requests_running{a="' + "x" * 100
    started = time.monotonic()
    assert parse("\n".join([line] * 40_000)) is None
    assert parse(line * 40_000) is None
    assert time.monotonic() - started < SLACK_S


def test_a_queue_at_the_server_shortens_the_limit_at_once() -> None:
    limit = Limit(100)
    limit.observe(Load(running=20, waiting=80, cache=0.5, preemptions=0), None, 100)
    assert limit.value == 22
    limit.observe(Load(running=20, waiting=2, cache=0.5, preemptions=0), None, 22)
    assert limit.value == 22


def test_an_empty_queue_lets_it_grow_to_its_maximum() -> None:
    limit = Limit(100)
    limit.restart(10)
    idle = Load(running=10, waiting=0, cache=0.2, preemptions=0)
    limit.observe(idle, None, 2)
    assert limit.value == 10, "not while it is not used"
    for _ in range(20):
        limit.observe(idle, idle, limit.value)
    assert limit.value == 100


def test_answers_do_not_lengthen_the_queue_of_a_server_that_tells_it() -> None:
    limit = Limit(100)
    limit.observe(Load(running=10, waiting=90, cache=0.5, preemptions=0), None, 100)
    short = limit.value
    for _ in range(1_000):
        limit.good(short - 1)
    assert limit.value == short
    limit.observe(None, None, short)
    for _ in range(5_000):
        limit.good(limit.value - 1)
    assert limit.value == 100


def test_answers_make_it_grow_while_nothing_waits_there() -> None:
    """A few refusals between two looks at the load must not leave an idle server unused."""
    limit = Limit(64)
    limit.observe(Load(running=3, waiting=0, cache=0.1, preemptions=0), None, 3)
    for call in range(20):
        limit.overloaded(call, call)
    assert limit.value == 1
    for _ in range(2_000):
        limit.good(limit.value - 1)
    assert limit.value == 64


def test_preemptions_and_a_full_cache_stop_growth() -> None:
    limit = Limit(100)
    before = Load(running=50, waiting=0, cache=0.5, preemptions=1)
    limit.observe(before._replace(preemptions=2), before, 100)
    assert limit.value == 70
    limit.observe(before._replace(cache=0.99), before, 70)
    assert limit.value == 70
