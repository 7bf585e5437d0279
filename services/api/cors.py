"""Which browser pages may use the three routes of a presigned upload."""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from typing import Any

from schemas.settings import Http

_PATHS = re.compile(r"/v1/files/presign|/v1/files/[^/]+/complete|/v1/uploads/[^/]+")
MAX_AGE_S = 600


class Cors:
    def __init__(self, http: Http) -> None:
        self._origins = {origin.encode() for origin in http.cors_origins}

    def headers(self, scope: MutableMapping[str, Any]) -> list[tuple[bytes, bytes]]:
        """What to add to an answer, errors included."""
        if not self._origins or _PATHS.fullmatch(scope["path"]) is None:
            return []
        vary = [(b"vary", b"Origin")]
        origin = dict(scope["headers"]).get(b"origin")
        if origin is None or not (b"*" in self._origins or origin in self._origins):
            return vary
        allowed = [
            (b"access-control-allow-origin", b"*" if b"*" in self._origins else origin),
            (b"access-control-expose-headers", b"x-request-id, retry-after"),
        ]
        if self.is_preflight(scope):
            allowed += [
                (b"access-control-allow-methods", b"POST, PUT"),
                (b"access-control-allow-headers", b"authorization, content-type, x-api-key"),
                (b"access-control-max-age", str(MAX_AGE_S).encode()),
            ]
        return vary + allowed

    def is_preflight(self, scope: MutableMapping[str, Any]) -> bool:
        return (
            scope["method"] == "OPTIONS"
            and bool(self._origins)
            and _PATHS.fullmatch(scope["path"]) is not None
            and b"access-control-request-method" in dict(scope["headers"])
        )
