"""What the API answers when it does not do what was asked, in OpenAI's shape.

A refusal is raised wherever the reason is found and rendered in one place. It never carries more than the
caller may know.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from schemas.errors import ErrorBody, ErrorDetail

RETRY_AFTER_S = 5
"""What 429 and 503 ask for: the condition usually passes within seconds."""


class Refusal(Exception):
    """One error answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        if status == 409:
            self.headers["x-should-retry"] = "false"
        if status in (429, 503):
            self.headers["retry-after"] = str(RETRY_AFTER_S)

    def body(self) -> bytes:
        return msgspec.json.encode(
            ErrorBody(ErrorDetail(self.message, _type(self.status), self.code, self.param))
        )


def _type(status: int) -> str:
    if status >= 500:
        return "server_error"
    return "rate_limit_error" if status == 429 else "invalid_request_error"


def invalid(message: str, param: str | None = None, code: str | None = None) -> Refusal:
    return Refusal(400, message, code=code, param=param)


def invalid_key() -> Refusal:
    return Refusal(
        401,
        "The API key is missing or not valid.",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def not_found() -> Refusal:
    """The same whatever was asked for: an id of somebody else looks like one that never was."""
    return Refusal(404, "There is nothing here under this id or path.", code="not_found")


def method_not_allowed(headers: Mapping[str, str] | None) -> Refusal:
    """`headers` has Allow."""
    return Refusal(405, "This method is not available here.", headers=headers)


def too_large(limit: int) -> Refusal:
    return Refusal(
        413,
        f"The file is larger than {limit:,} bytes. If it carries images, JPEGs of at most about 1,600 pixels "
        "on the long side usually make it fit; otherwise split it into several files.",
        code="file_too_large",
        headers={"connection": "close"},
    )


def unavailable(message: str = "The service cannot answer right now; try again.") -> Refusal:
    return Refusal(503, message, code="unavailable")
