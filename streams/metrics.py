"""The catalogue of metrics: every number a process shows, who owns it, and by what it is told apart.

The objects live here, unregistered; a process serves those of its own role (`registry`). Labels are bounded:
models, endpoints, routes and codes that we know, an organization's id at most, nothing of a request. Counters
count since the process started. `streams/README.md` shows the same table.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

SECONDS = (0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800)
"""From a read of the read model to the longest call."""


class Entry(NamedTuple):
    """One row of the catalogue. A counter's name ends in `_total`."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str
    owner: str


CATALOGUE: list[Entry] = []
_OBJECTS: dict[str, MetricWrapperBase] = {}

_Metric = TypeVar("_Metric", bound=MetricWrapperBase)


def _entered(
    metric: _Metric, kind: str, owner: str, name: str, text: str, labels: tuple[str, ...]
) -> _Metric:
    CATALOGUE.append(Entry(name, kind, labels, text, owner))
    _OBJECTS[name] = metric
    return metric


def _counter(owner: str, name: str, text: str, *labels: str) -> Counter:
    return _entered(Counter(name, text, labels, registry=None), "counter", owner, name, text, labels)


def _gauge(owner: str, name: str, text: str, *labels: str) -> Gauge:
    return _entered(Gauge(name, text, labels, registry=None), "gauge", owner, name, text, labels)


def _seconds(owner: str, name: str, text: str, *labels: str) -> Histogram:
    metric = Histogram(name, text, labels, registry=None, buckets=SECONDS)
    return _entered(metric, "histogram", owner, name, text, labels)


API_REQUESTS = _counter(
    "api", "openrelay_api_requests_total", "Requests answered.", "method", "route", "status"
)
API_SECONDS = _seconds(
    "api", "openrelay_api_request_seconds", "Time from a request's headers to its answer's start.", "route"
)
API_UPLOADS = _counter("api", "openrelay_api_uploads_total", "Files registered.")
API_UPLOAD_BYTES = _counter("api", "openrelay_api_upload_bytes_total", "Bytes of the files registered.")
API_VALIDATED_RECORDS = _counter(
    "api", "openrelay_api_validated_records_total", "Records judged at create.", "verdict"
)
API_VALIDATED_BYTES = _counter(
    "api", "openrelay_api_validated_bytes_total", "Bytes of input judged record by record."
)
API_VALIDATION_SECONDS = _seconds(
    "api", "openrelay_api_validation_seconds", "Time to judge an input, waiting for a worker included."
)

CALLS = _counter(
    "dispatch",
    "openrelay_dispatch_calls_total",
    "Calls to model servers that ended, by status class or by how they failed.",
    "model",
    "outcome",
)
CALL_SECONDS = _seconds(
    "dispatch", "openrelay_dispatch_call_seconds", "Time of a call, waiting in the server included.", "model"
)
RETRIES = _counter(
    "dispatch", "openrelay_dispatch_retries_total", "Calls whose record was to be tried again.", "model"
)
IN_FLIGHT = _gauge("dispatch", "openrelay_dispatch_in_flight", "Calls running now.", "model", "endpoint")
SLOTS = _gauge(
    "dispatch",
    "openrelay_dispatch_slots",
    "Calls this process may have running now: the adaptive limit.",
    "model",
    "endpoint",
)
MAX_SLOTS = _gauge(
    "dispatch",
    "openrelay_dispatch_max_slots",
    "This process's share of max_concurrency, where the limit stops.",
    "model",
    "endpoint",
)
ENDPOINT_OUT = _gauge(
    "dispatch", "openrelay_dispatch_endpoint_out", "1 while an endpoint gets no calls.", "model", "endpoint"
)
READY = _gauge(
    "dispatch", "openrelay_dispatch_ready_records", "Records read and waiting for a slot.", "model"
)
RETRYING = _gauge(
    "dispatch", "openrelay_dispatch_retrying_records", "Records waiting for their next try.", "model"
)
OPEN_BATCHES = _gauge(
    "dispatch", "openrelay_dispatch_open_batches", "Batches with records in our partitions.", "model"
)
STUCK = _gauge(
    "dispatch",
    "openrelay_dispatch_stuck_records",
    "Records neither finished nor in flight for longer than limits.stuck_after_s; the log names them.",
    "model",
)
READY_BYTES = _gauge("dispatch", "openrelay_dispatch_ready_bytes", "Bytes of records read and waiting.")
UNACKED_BYTES = _gauge(
    "dispatch", "openrelay_dispatch_unacked_bytes", "Bytes of results on their way to the log."
)
CRASHED_LANES = _counter(
    "dispatch",
    "openrelay_dispatch_crashed_lanes_total",
    "Done-sets restored that found records running at a crash.",
)

LOOPS = _gauge(
    "dispatch", "openrelay_dispatch_loop_records", "Records with tools or a workflow that are under way."
)
TOOL_REQUESTS = _counter(
    "dispatch",
    "openrelay_dispatch_tool_requests_total",
    "Rounds of tools and calls of workflow callbacks that ended.",
    "kind",
    "outcome",
)
TOOL_SECONDS = _seconds(
    "dispatch",
    "openrelay_dispatch_tool_seconds",
    "Time of a round of tools or a callback, waiting for a place not included.",
    "kind",
)

VERDICTS = _counter("settle", "openrelay_settle_verdicts_total", "Records given their verdict.", "kind")
WASTE = _counter("settle", "openrelay_settle_waste_total", "Results that came second, or too late.")
SETTLED = _counter("settle", "openrelay_settle_batches_total", "Batches settled.", "cause")
FLUSH_SECONDS = _seconds(
    "settle", "openrelay_settle_flush_seconds", "Time to write verdicts, ledger and offsets."
)

SINK_LINES = _counter("sink", "openrelay_sink_lines_total", "Lines read.", "topic")
SEGMENTS = _counter("sink", "openrelay_sink_segments_total", "Segments written.")
MERGES = _counter("sink", "openrelay_sink_merges_total", "Batches merged into their files.", "outcome")
MERGE_SECONDS = _seconds("sink", "openrelay_sink_merge_seconds", "Time to merge a batch's files.")

METER_ROWS = _counter("meter", "openrelay_meter_rows_total", "Rows ClickHouse has acknowledged.", "table")
METER_FAILURES = _counter(
    "meter", "openrelay_meter_insert_failures_total", "Inserts that failed and were repeated.", "table"
)
METER_SECONDS = _seconds(
    "meter", "openrelay_meter_insert_seconds", "Time of an insert, its repeats included.", "table"
)

LAG = _gauge(
    "control",
    "openrelay_lag_records",
    "Records a consumer group has not finished.",
    "group",
    "topic",
    "partition",
)
LAG_OLDEST = _gauge(
    "control",
    "openrelay_lag_oldest_seconds",
    "How long the oldest record that a group has not finished has waited, once a minute.",
    "group",
    "topic",
)
ROLE_UP = _gauge("control", "openrelay_role_up", "1 when the process shows its metrics.", "role")


def registry(owner: str) -> CollectorRegistry:
    """The metrics of one role."""
    made = CollectorRegistry()
    for entry in CATALOGUE:
        if entry.owner == owner:
            made.register(_OBJECTS[entry.name])
    return made
