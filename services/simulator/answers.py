"""What the simulated model answers: a pure function of the prompt, its behaviour and the call's number."""

from __future__ import annotations

import gzip
from enum import Enum
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from schemas.errors import ErrorBody, ErrorDetail
from services.simulator.behaviours import Behaviour
from services.simulator.prompts import Prompt

FINGERPRINT = "fp_openrelay_simulator"
_QUOTED_WORDS = 12
_JSON = b"application/json"


class Delivery(Enum):
    WHOLE = "whole"
    HALF = "half"
    """Headers that promise the whole body, half of it, end of the connection."""
    DRIP = "drip"
    DROP = "drop"
    RESET = "reset"


class Reply(msgspec.Struct, frozen=True):
    """An HTTP answer and how much of it arrives, and how."""

    status: int
    body: bytes
    content_type: bytes = _JSON
    headers: bytes = b""
    """Further header lines, each with its line end."""
    delivery: Delivery = Delivery.WHOLE
    pause_s: float = 0.0


class _PromptDetails(msgspec.Struct):
    cached_tokens: int


class _CompletionDetails(msgspec.Struct):
    reasoning_tokens: int


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: _PromptDetails
    completion_tokens_details: _CompletionDetails


class _FunctionCall(msgspec.Struct):
    name: str
    arguments: str


class _ToolCall(msgspec.Struct):
    id: str
    function: _FunctionCall
    type: str = "function"


class _Message(msgspec.Struct):
    content: str | None
    role: str = "assistant"
    tool_calls: list[_ToolCall] | UnsetType = UNSET


class _ChatChoice(msgspec.Struct):
    message: _Message | None
    finish_reason: str
    index: int = 0
    logprobs: None = None


class _TextChoice(msgspec.Struct):
    text: str
    finish_reason: str
    index: int
    logprobs: None = None


class _Completion(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[_ChatChoice] | list[_TextChoice] | UnsetType
    usage: _Usage | Raw | UnsetType | None
    system_fingerprint: str = FINGERPRINT
    nested: Raw | UnsetType = UNSET


_encode = msgspec.json.Encoder().encode


def answer(prompt: Prompt, behaviour: Behaviour, number: int, now_s: float) -> Reply:
    """The reply to call `number` of this server, made at Unix time `now_s`."""
    match behaviour.fault:
        case "status":
            return _status(behaviour)
        case "unknown-model":
            return unknown_model(prompt.model)
        case "drop":
            return Reply(0, b"", delivery=Delivery.DROP)
        case "reset":
            return Reply(0, b"", delivery=Delivery.RESET)
        case "empty":
            return Reply(200, b"{}")
        case "nonjson":
            return Reply(200, b"the model is thinking")
        case "html":
            return Reply(200, b"<!doctype html><p>Bad gateway</p>", content_type=b"text/html")
        case "json":
            return Reply(200, behaviour.body.encode())
    body = _encode(_completion(prompt, behaviour, number, now_s))
    match behaviour.fault:
        case "half":
            return Reply(200, body, delivery=Delivery.HALF)
        case "drip":
            return Reply(200, body, delivery=Delivery.DRIP, pause_s=behaviour.pause_s)
        case "gzip":
            return Reply(200, gzip.compress(body, mtime=0), headers=b"content-encoding: gzip\r\n")
    return Reply(200, body)


def error(status: int, message: str, code: str | None = None, param: str | None = None) -> Reply:
    """An HTTP error in OpenAI's shape."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return Reply(status, _encode(ErrorBody(ErrorDetail(message, kind, code, param))))


def unknown_model(model: str) -> Reply:
    return error(404, f"The model `{model}` does not exist.", "model_not_found", "model")


def _status(behaviour: Behaviour) -> Reply:
    status = behaviour.status
    if status == 403:
        return Reply(403, b"")
    if 300 <= status < 400:
        return Reply(status, b"", headers=b"location: /v1/models\r\n")
    if status == 400:
        message = "This model's maximum context length is 131072 tokens; the messages have more."
        return error(400, message, "context_length_exceeded", "messages")
    reply = error(status, f"Simulated status {status}.", f"simulated_{status}")
    if behaviour.retry_after_s:
        header = b"retry-after: %g\r\n" % behaviour.retry_after_s
        return msgspec.structs.replace(reply, headers=header)
    return reply


def _completion(prompt: Prompt, behaviour: Behaviour, number: int, now_s: float) -> _Completion:
    choices: list[_ChatChoice] | list[_TextChoice] | UnsetType
    if prompt.chat:
        choice, words = _chat_choice(prompt, behaviour)
        choices = [choice]
    else:
        choices, words = _text_choices(prompt, behaviour)
    match behaviour.fault:
        case "nochoices":
            choices = UNSET
        case "nochoice":
            choices = []
    return _Completion(
        id=f"{'chatcmpl' if prompt.chat else 'cmpl'}-{number:012x}",
        object="chat.completion" if prompt.chat else "text_completion",
        created=int(now_s),
        model=prompt.model,
        choices=choices,
        usage=_usage(behaviour.usage, prompt.words, words),
        nested=Raw(b"[" * behaviour.depth + b"]" * behaviour.depth) if behaviour.depth else UNSET,
    )


def _chat_choice(prompt: Prompt, behaviour: Behaviour) -> tuple[_ChatChoice, int]:
    if behaviour.fault == "nomessage":
        return _ChatChoice(None, "stop"), 0
    if prompt.rounds < behaviour.rounds:
        calls = [_tool_call(prompt, behaviour, index) for index in range(behaviour.calls)]
        words = sum(len(call.function.arguments.split()) for call in calls)
        return _ChatChoice(_Message(None, tool_calls=calls), "tool_calls"), words
    text, words, cut = _text(prompt, prompt.text, behaviour)
    return _ChatChoice(_Message(text), "length" if cut else "stop"), words


def _text_choices(prompt: Prompt, behaviour: Behaviour) -> tuple[list[_TextChoice], int]:
    choices, total = [], 0
    for index, asked in enumerate(prompt.texts):
        text, words, cut = _text(prompt, asked, behaviour)
        choices.append(_TextChoice(text, "length" if cut else "stop", index))
        total += words
    return choices, total


def _text(prompt: Prompt, asked: str, behaviour: Behaviour) -> tuple[str, int, bool]:
    """The answer to one text, its words, and whether it was cut off."""
    if behaviour.content_bytes is not None:
        text = ("lorem " * (behaviour.content_bytes // 6 + 1))[: behaviour.content_bytes]
        return text, len(text.split()), False
    quoted = asked.split(None, _QUOTED_WORDS)[:_QUOTED_WORDS]
    words = ["You", "asked:", *quoted]
    if prompt.rounds:
        words += ["The", "tools", "said:", *prompt.tool_content.split(None, _QUOTED_WORDS)[:_QUOTED_WORDS]]
    limit = prompt.max_words
    cut = (limit is not None and limit < len(words)) or behaviour.usage == "null"
    if limit is not None:
        words = words[: max(limit, 0)]
    return " ".join(words), len(words), cut


def _tool_call(prompt: Prompt, behaviour: Behaviour, index: int) -> _ToolCall:
    """Call `index` of this round: id and arguments are the same however often the round is asked for."""
    name, schema = ("lookup", {}) if not prompt.functions else prompt.functions[index % len(prompt.functions)]
    match behaviour.arguments:
        case "notjson":
            arguments = '{"query": '
        case "array":
            arguments = "[1, 2]"
        case "blank":
            arguments = ""
        case _:
            arguments = _encode(_instance(schema, prompt.rounds)).decode()
    return _ToolCall(f"call_{prompt.digest()}_{index}", _FunctionCall(name, arguments))


def _instance(schema: dict[str, Any], turn: int) -> dict[str, object]:
    """An object that fits the simple part of JSON Schema that tool parameters are written in."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {str(name): _value(str(name), kind, turn) for name, kind in properties.items()}


def _value(name: str, schema: object, turn: int) -> object:
    if not isinstance(schema, dict):
        return None
    choices = schema.get("enum")
    if isinstance(choices, list) and choices:
        return choices[turn % len(choices)]
    match schema.get("type"):
        case "integer" | "number":
            return turn
        case "boolean":
            return turn % 2 == 0
        case "array":
            return []
        case "object":
            return _instance(schema, turn)
    return f"{name} {turn}"


def _usage(kind: str, prompt: int, completion: int) -> _Usage | Raw | UnsetType | None:
    def written(first: str, second: str, total: str) -> Raw:
        text = f'{{"prompt_tokens":{first},"completion_tokens":{second},"total_tokens":{total}}}'
        return Raw(text.encode())

    match kind:
        case "missing":
            return UNSET
        case "null":
            return None
        case "negative":
            return written(str(prompt), str(-completion - 1), str(prompt))
        case "string":
            return written(f'"{prompt}"', f'"{completion}"', f'"{prompt + completion}"')
        case "float":
            return written(f"{prompt}.5", str(completion), f"{prompt + completion}.5")
        case "huge":
            return written("1e30", str(completion), "1e30")
        case "badtotal":
            return written(str(prompt), str(completion), str(prompt + completion + 7))
    cached = prompt + 1 if kind == "overcached" else 0
    reasoning = 0
    if "/" in kind:
        prompt, completion, cached, reasoning = ([int(part) for part in kind.split("/")] + [0, 0])[:4]
    return _Usage(
        prompt,
        completion,
        prompt + completion,
        _PromptDetails(cached),
        _CompletionDetails(reasoning),
    )
