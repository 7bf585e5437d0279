"""Verdicts in the metrics."""

from __future__ import annotations

from schemas.records import Remainder
from streams import metrics
from streams.core import bitmap
from streams.core.verdicts import Effects, Spec


def count(spec: Spec, effects: Effects) -> None:
    """What follows from one result was sent on its way."""
    if effects.waste:
        metrics.WASTE.inc()
    if effects.output is not None:
        metrics.VERDICTS.labels("output").inc()
    if isinstance(effects.error, Remainder):
        metrics.VERDICTS.labels("unfinished").inc(spec.accepted - bitmap.count(effects.error.seen))
    elif effects.error is not None:
        metrics.VERDICTS.labels("error").inc()
    if effects.cut_off:
        metrics.VERDICTS.labels("unfinished").inc(len(effects.cut_off))
    if effects.settled is not None:
        metrics.SETTLED.labels(effects.settled.cause.value).inc()
