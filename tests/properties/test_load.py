"""Whatever a model server writes into its `/metrics`: a load that limits can be set by, or none."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from streams.core.limits import Limit
from streams.core.load import LARGEST_COUNT, Load, parse

NAMES = st.sampled_from(
    [
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "vllm:num_preemptions_total",
    ]
)
LABELS = st.one_of(
    st.just(""),
    st.text(max_size=20).map(lambda text: "{" + text),
    st.text(max_size=20).map(lambda text: '{a="' + text.replace("\\", "").replace('"', "") + '"}'),
)
FLOATS = st.floats(allow_nan=True, allow_infinity=True)
COUNTS = st.integers(0, 1_000)
SPELLINGS = st.one_of(
    FLOATS.map(repr),
    FLOATS.map(lambda number: f"{number:+.3E}"),
    COUNTS.map(str),
    COUNTS.map(lambda count: f"{count}.0"),
    st.integers().map(str),
    st.integers(300, 5_000).map(lambda digits: "9" * digits),
    st.sampled_from(
        [
            "NaN",
            "+Inf",
            "-Inf",
            "inf",
            "1e999",
            "-1e999",
            "-0",
            "1_0",
            "0x1p4",
            "٣",
            ".",
            "e",
            "1e",
            "+",
            "--1",
        ]
    ),
    st.text(max_size=10),
)
LINES = st.builds("{}{} {}".format, NAMES, LABELS, SPELLINGS)
TEXTS = st.one_of(st.text(), st.lists(LINES, max_size=12).map("\n".join))


def sane(load: Load | None) -> None:
    if load is not None:
        assert all(type(count) is int for count in (load.running, load.waiting, load.preemptions))
        assert min(load.running, load.waiting, load.preemptions) >= 0
        assert math.isfinite(load.cache)
        assert 0 <= load.cache <= 1


@given(TEXTS)
def test_any_text(text: str) -> None:
    sane(parse(text))


@given(st.binary())
def test_any_bytes(data: bytes) -> None:
    sane(parse(data.decode("utf-8", errors="replace")))


@given(st.lists(TEXTS.map(parse), min_size=2, max_size=6), st.integers(0, 10_000), st.integers(0, 10_000))
def test_a_limit_takes_whatever_was_told(loads: list[Load | None], maximum: int, in_flight: int) -> None:
    limit = Limit(maximum)
    for before, load in itertools.pairwise(loads):
        limit.observe(load, before, in_flight)
        assert min(1, maximum) <= limit.value <= max(1, maximum)


@given(*[st.integers(0, LARGEST_COUNT)] * 3, st.integers(1, 1_000))
def test_a_limit_takes_any_counts(running: int, waiting: int, preemptions: int, engines: int) -> None:
    """Of as many engines as an answer has room for."""
    lines = [
        f"vllm:num_requests_running {running}",
        f"vllm:num_requests_waiting {waiting}",
        f"vllm:num_preemptions_total {preemptions}",
    ]
    load = parse("\n".join(lines * engines))
    assert load is not None
    sane(load)
    limit = Limit(64)
    limit.observe(load, load._replace(preemptions=0), 64)
    assert 1 <= limit.value <= 64
