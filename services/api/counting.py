"""Requests in the metrics, told apart by route, not by path: a path holds ids, and anything else."""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from typing import Any

from streams import metrics

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"})

_ROUTES = (
    (re.compile(r"/(health|openapi\.json)|/v1/(files|files/presign|batches|models)"), None),
    (re.compile(r"/v1/models/.+"), "/v1/models/{model}"),
    (re.compile(r"/v1/uploads/[^/]+"), "/v1/uploads/{file}"),
    (re.compile(r"/v1/files/[^/]+/content"), "/v1/files/{file}/content"),
    (re.compile(r"/v1/files/[^/]+/complete"), "/v1/files/{file}/complete"),
    (re.compile(r"/v1/files/[^/]+"), "/v1/files/{file}"),
    (re.compile(r"/v1/batches/[^/]+/cancel"), "/v1/batches/{batch}/cancel"),
    (re.compile(r"/v1/batches/[^/]+"), "/v1/batches/{batch}"),
)


def count_request(scope: MutableMapping[str, Any], status: int, seconds: float) -> None:
    """An answer was begun, so many seconds after the request's headers had come."""
    route = route_of(scope["path"])
    method = scope["method"] if scope["method"] in METHODS else "other"
    metrics.API_REQUESTS.labels(method, route, str(status)).inc()
    metrics.API_SECONDS.labels(route).observe(seconds)


def route_of(path: str) -> str:
    """One of our routes, or `other`."""
    for pattern, name in _ROUTES:
        if pattern.fullmatch(path):
            return path if name is None else name
    return "other"
