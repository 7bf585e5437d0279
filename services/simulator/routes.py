"""Routes of the simulator other than the model calls: probes, counts and control."""

from __future__ import annotations

import time

import msgspec

from schemas.settings import Strict
from services.simulator.answers import Reply, error
from services.simulator.model import Options, SimulatedModel


class _Change(Strict, frozen=True, kw_only=True):
    """POST /control: any of the options, `status` for `behaviour: "status:N"`, `reset` for the counts."""

    latency_ms: float | msgspec.UnsetType = msgspec.UNSET
    latency_sigma: float | msgspec.UnsetType = msgspec.UNSET
    concurrency: int | msgspec.UnsetType = msgspec.UNSET
    healthy: bool | msgspec.UnsetType = msgspec.UNSET
    probes: bool | msgspec.UnsetType = msgspec.UNSET
    behaviour: str | msgspec.UnsetType | None = msgspec.UNSET
    log_bodies: bool | msgspec.UnsetType = msgspec.UNSET
    status: int | msgspec.UnsetType | None = msgspec.UNSET
    reset: bool = False


_METRICS = """\
# HELP vllm:num_requests_running Calls that have a slot.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{labels} {running}.0
# HELP vllm:num_requests_waiting Calls that wait for a slot.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{labels} {waiting}.0
# HELP vllm:kv_cache_usage_perc Share of the slots in use; 1 is all.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{labels} {share}
# HELP vllm:num_preemptions_total Calls put back into the queue.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{labels} 0.0
"""

_METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


def route(model: SimulatedModel, method: bytes, path: bytes, body: bytes) -> Reply:
    """Answer a request that calls no model."""
    options = model.options
    match method, path:
        case b"GET", b"/v1/models":
            return _json({"object": "list", "data": [_model_object(name) for name in model.models]})
        case b"GET", b"/health" if options.probes:
            return Reply(200 if options.healthy else 503, b"")
        case b"GET", b"/metrics" if options.probes:
            return Reply(200, _metrics(model).encode(), content_type=_METRICS_TYPE)
        case b"GET", b"/stats":
            return _json(model.stats())
        case b"GET", b"/calls":
            calls = model.calls
            return _json({"count": calls.count, "prompts": calls.by_marker, "truncated": calls.truncated})
        case b"POST", b"/control":
            return _control(model, body)
    return error(404, f"No route {method.decode('latin-1')} {path.decode('latin-1')}.", "not_found")


def _json(value: object) -> Reply:
    return Reply(200, msgspec.json.encode(value))


def _model_object(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": int(time.time()), "owned_by": "openrelay-simulator"}


def _metrics(model: SimulatedModel) -> str:
    stats = model.stats()
    name = model.models[0] if model.models else "any"
    escaped = name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return (
        _METRICS.replace("{labels}", f'{{engine="0",model_name="{escaped}"}}')
        .replace("{running}", str(stats.running))
        .replace("{waiting}", str(stats.waiting))
        .replace("{share}", str(min(1.0, stats.running / model.options.concurrency)))
    )


def _control(model: SimulatedModel, body: bytes) -> Reply:
    """Change options; the answer is what GET /stats says afterwards."""
    try:
        change = msgspec.json.decode(body, type=_Change)
        changes = {
            name: value
            for name in Options.__struct_fields__
            if (value := getattr(change, name)) is not msgspec.UNSET
        }
        if change.status is not msgspec.UNSET:
            changes["behaviour"] = None if change.status is None else f"status:{change.status}"
        options = msgspec.structs.replace(model.options, **changes)
    except (msgspec.MsgspecError, ValueError) as fault:
        return error(400, f"Not a change of options: {fault}.", "invalid_control")
    if change.reset:
        model.reset()
    model.configure(options)
    return _json(model.stats())
