"""Errors of the control host, in OpenAI's shape."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from schemas.errors import ErrorBody, ErrorDetail


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.body = ErrorBody(ErrorDetail(message=message, type=kind, code=code, param=param))

    def response(self) -> Response:
        headers = {"retry-after": "5"} if self.status == 503 else {}
        return Response(msgspec.json.encode(self.body), self.status, headers, "application/json")


def unauthorized() -> ApiError:
    """Missing, malformed, unknown and revoked keys are told apart by nobody."""
    return ApiError(401, "invalid_api_key", "Incorrect API key provided.")


def not_found() -> ApiError:
    return ApiError(404, "not_found", "There is nothing here.")


def bad_request(message: str, param: str) -> ApiError:
    return ApiError(400, "invalid_request", message, param)


def unavailable(what: str) -> ApiError:
    return ApiError(503, "unavailable", f"{what} does not answer; try again shortly.")
