"""The error body of the HTTP API, in OpenAI's shape, and the codes of records that fail."""

from __future__ import annotations

import msgspec


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    code: str | None
    param: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class RecordCode:
    """Codes of records rejected at create, in the order in which they are looked for."""

    RECORD_TOO_LARGE = "record_too_large"
    INVALID_JSON = "invalid_json"
    INVALID_RECORD = "invalid_record"
    INVALID_CUSTOM_ID = "invalid_custom_id"
    DUPLICATE_CUSTOM_ID = "duplicate_custom_id"
    INVALID_METHOD = "invalid_method"
    URL_MISMATCH = "url_mismatch"
    INVALID_BODY = "invalid_body"
    TOOL_CONFIG_MOVED = "tool_config_moved"
    INVALID_OPENRELAY = "invalid_openrelay"
    INVALID_TOOL_CONFIG = "invalid_tool_config"
    INVALID_WORKFLOW = "invalid_workflow"
    WORKFLOW_NOT_ENABLED = "workflow_not_enabled"
    MISSING_MODEL = "missing_model"
    MODEL_NOT_FOUND = "model_not_found"
    MODEL_MISMATCH = "model_mismatch"
    STREAM_NOT_SUPPORTED = "stream_not_supported"


class RunCode:
    """Codes of records that ran, or would have, and have no HTTP answer to show."""

    BATCH_EXPIRED = "batch_expired"
    BATCH_CANCELLED = "batch_cancelled"
    REQUEST_TIME_LIMIT = "request_time_limit"
    TOOL_EXECUTION_FAILED = "tool_execution_failed"
    MODEL_UNAVAILABLE = "model_unavailable"
    INVALID_MODEL_RESPONSE = "invalid_model_response"
    PROCESSING_FAILED = "processing_failed"
    WORKFLOW_FAILED = "workflow_failed"
    WORKFLOW_CALLBACK_FAILED = "workflow_callback_failed"
    WORKFLOW_LIMIT_EXCEEDED = "workflow_limit_exceeded"
