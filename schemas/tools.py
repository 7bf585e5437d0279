"""What goes between us and executors of tools: our own protocol, and the part of MCP that we speak."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

MCP_CLIENT_NAME = "openrelay-batch-worker"
MCP_VERSION = "2025-11-25"
"""The revision we ask for."""

MCP_VERSIONS = frozenset({"2025-03-26", "2025-06-18", "2025-11-25"})
"""Revisions a server may answer with."""

MCP_OLDEST = "2025-03-26"
"""What a server speaks that does not say."""


class FunctionCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    """One element of a message's `tool_calls`."""

    id: str
    function: FunctionCall


class ToolMessage(msgspec.Struct, frozen=True):
    """What the model is told of a call."""

    tool_call_id: str
    content: str
    role: Literal["tool"] = "tool"


class ExecuteRequest(msgspec.Struct, frozen=True):
    """POST to an `http` executor. `tool_calls` are as the model wrote them."""

    custom_id: str
    context: Raw
    tool_calls: Raw


class ToolResult(msgspec.Struct, frozen=True):
    tool_call_id: str
    content: str


class ExecuteAnswer(msgspec.Struct, frozen=True):
    results: list[ToolResult]


class RpcRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A JSON-RPC request, or without `id` a notification."""

    method: str
    jsonrpc: str = msgspec.field(default_factory=lambda: "2.0")
    id: int | UnsetType = UNSET
    params: Raw | UnsetType = UNSET


class RpcError(msgspec.Struct, frozen=True):
    code: int


class RpcMessage(msgspec.Struct, frozen=True):
    """Anything a server sends: a response has `result` or `error`, a request `method` and `id`."""

    id: int | str | None = None
    method: str | UnsetType = UNSET
    result: Raw | UnsetType = UNSET
    error: RpcError | UnsetType = UNSET

    @property
    def is_response(self) -> bool:
        return self.method is UNSET and not (self.result is UNSET and self.error is UNSET)


class RpcReply(msgspec.Struct, frozen=True):
    """Our answer to a request of the server."""

    id: int | str
    jsonrpc: str = "2.0"
    result: dict[str, str] | UnsetType = UNSET
    error: dict[str, int | str] | UnsetType = UNSET


class InitializeResult(msgspec.Struct, frozen=True):
    protocolVersion: str = MCP_OLDEST


class ContentItem(msgspec.Struct, frozen=True):
    """An item of a tool's result; only those of type `text` reach the model."""

    type: str
    text: str = ""


class CallToolResult(msgspec.Struct, frozen=True):
    content: list[ContentItem] = []
