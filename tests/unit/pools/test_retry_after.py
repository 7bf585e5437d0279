"""How long a model server asks us to wait."""

from __future__ import annotations

import pytest

from streams.pools.openai import MAX_RETRY_AFTER_S, retry_after_s

NOON = "Sun, 29 Nov 2026 12:00:00 GMT"
NOON_S = 1_795_953_600.0


@pytest.mark.parametrize(
    ("value", "wait_s"),
    [
        (None, None),
        ("0", 0.0),
        ("30", 30.0),
        (" 2.5 ", 2.5),
        ("86400", MAX_RETRY_AFTER_S),
        ("9" * 5_000, MAX_RETRY_AFTER_S),
        ("Sun, 29 Nov 2026 12:00:40 GMT", 40.0),
        ("Sunday, 29-Nov-26 12:00:40 GMT", 40.0),
        ("Sun Nov 29 12:00:40 2026", 40.0),
        ("Sun, 29 Nov 2026 11:00:00 GMT", 0.0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", MAX_RETRY_AFTER_S),
        ("Sun, 29 Nov 99999 12:00:00 GMT", None),
        ("Mon, 01 Jan 0001 00:00:00 +2359", 0.0),
        ("Sun, 29 Nov 2026 12:00:40 +9999", None),
        ("", None),
        ("-1", None),
        ("nan", None),
        ("inf", None),
        ("soon", None),
        ("x" * 60_000, None),
    ],
)
def test_all_forms(value: str | None, wait_s: float | None) -> None:
    assert retry_after_s(value, NOON, NOON_S + 3_000) == wait_s


@pytest.mark.parametrize("date", [None, "", "nonsense"])
def test_without_the_servers_date_ours_counts(date: str | None) -> None:
    assert retry_after_s("Sun, 29 Nov 2026 12:00:40 GMT", date, NOON_S + 10) == 30.0
