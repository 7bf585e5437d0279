"""A record is called late before the log forgets it."""

from __future__ import annotations

import pytest

from schemas.topics import requests_name
from services.control.sampling import retention_s, show
from services.operator.waiting import Waiting
from streams import metrics

HOUR_S = 3_600.0


@pytest.mark.parametrize(
    ("topic", "hours"),
    [("results", 72), ("usage", 14 * 24), (requests_name("openrelay/m"), 72), ("batches", None)],
)
def test_a_topic_forgets_after_its_retention(topic: str, hours: int | None) -> None:
    assert retention_s(topic) == (None if hours is None else hours * HOUR_S)


def test_the_oldest_of_all_partitions_counts(caplog: pytest.LogCaptureFixture) -> None:
    def rows(hours: float) -> list[Waiting]:
        return [
            Waiting("settle", "results", 0, 5, 5, 0, None),
            Waiting("settle", "results", 1, 0, 9, 9, hours * HOUR_S),
            Waiting("meter", "batches", 0, 0, 9, 9, 10_000 * HOUR_S),
        ]

    show(rows(53))
    assert not caplog.records
    show(rows(55))
    [record] = caplog.records
    assert record.levelname == "ERROR"
    assert record.message == "settle is 55.0 h behind in results, which keeps records for 72.0 h"
    [family] = metrics.LAG_OLDEST.collect()
    assert {tuple(s.labels.values()): s.value for s in family.samples}[("settle", "results")] == 55 * HOUR_S
