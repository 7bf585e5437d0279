from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from schemas.facts import Priority
from schemas.money import Price, Usage
from schemas.settings import Model
from streams.core import pricing

tokens = st.integers(0, 1 << 40)
rates = st.integers(0, 10**12)


def half_up(exact: Fraction) -> int:
    return int(exact + Fraction(1, 2))


@given(tokens, tokens, tokens, rates, rates, rates, st.sampled_from([5_000, 10_000]))
def test_each_class_is_rounded_half_up_once(
    fresh: int, cached: int, output: int, a: int, b: int, c: int, bps: int
) -> None:
    parts = pricing.cost_parts(Usage(fresh + cached, output, cached), Price("p", a, b, c, bps))
    share = Fraction(bps, 10_000 * 1_000_000)
    assert parts == (
        half_up(fresh * a * share) + half_up(cached * b * share),
        half_up(output * c * share),
    )


def test_standard_is_half_of_the_sync_rate() -> None:
    model = Model(input_nano_usd_per_mtok=150_000_000, output_nano_usd_per_mtok=600_000_000)
    million = Usage(1_000_000, 1_000_000)
    for priority, cost in (
        (Priority.STANDARD, (75_000_000, 300_000_000)),
        (Priority.EXPEDITED, (150_000_000, 600_000_000)),
    ):
        assert pricing.cost_parts(million, pricing.price("m", model, priority)) == cost


def test_a_price_is_known_by_everything_in_it() -> None:
    model = Model(input_nano_usd_per_mtok=1, output_nano_usd_per_mtok=2)
    other = Model(input_nano_usd_per_mtok=1, output_nano_usd_per_mtok=3)
    ids = {
        pricing.price(name, m, priority).price_id
        for name in ("a", "b")
        for m in (model, other)
        for priority in Priority
    }
    assert len(ids) == 8
    assert pricing.price("a", model, Priority.STANDARD) == pricing.price("a", model, Priority.STANDARD)


def test_the_billing_month_is_utc() -> None:
    assert pricing.billing_month(1_796_083_199_999) == 202611
    assert pricing.billing_month(1_796_083_200_000) == 202612
