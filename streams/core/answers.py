"""Reading a model server's answer: is it one, what does it bill, how does it enter the line."""

from __future__ import annotations

import re
from typing import Any, NamedTuple, TypeGuard

import msgspec

from schemas.money import Usage
from streams.core import strictjson

MAX_TOKENS = 1 << 40
MAX_TEXT_BYTES = 64 * 1024
"""Of an error body that is not JSON, this much text is kept."""
MAX_DEPTH = 500
"""Of an answer's nesting. How deep a reader gets depends on its own stack, and of what we accept every stage
and the customer are readers; the usual limit is 1,000 levels together with the stack."""

_STRING_OR_SPACE = re.compile(rb'"(?:[^"\\]|\\.)*"|[ \t\r\n]+', re.DOTALL)

_decode = msgspec.json.Decoder().decode


class Answer(NamedTuple):
    """A good answer of the model: its parsed form, its usage, or why that is not usable."""

    parsed: dict[str, Any]
    usage: Usage | None
    unmetered: str


class Unusable(NamedTuple):
    """An answer with status 2xx that is none."""

    reason: str


def read(body: bytes, endpoint: str) -> Answer | Unusable:
    """Check an answer with status 2xx to a call of `endpoint`."""
    try:
        parsed = _parse(body)
    except _Unreadable as error:
        return Unusable(str(error))
    if not isinstance(parsed, dict):
        return Unusable("not a JSON object")
    choices = parsed.get("choices")
    if not isinstance(choices, list) or not choices:
        return Unusable("no choices")
    part = "message" if endpoint.endswith("/chat/completions") else "text"
    for choice in choices:
        if not isinstance(choice, dict) or choice.get(part) is None:
            return Unusable(f"a choice without {part}")
    usage, unmetered = usage_of(parsed.get("usage"))
    return Answer(parsed, usage, unmetered)


def usage_of(reported: Any) -> tuple[Usage | None, str]:
    """Billable usage from an answer's `usage`, or why it cannot be billed. A wrong total does not matter."""
    if reported is None:
        return None, "usage missing"
    if not isinstance(reported, dict):
        return None, "usage is not an object"
    counts: list[int] = []
    for name in ("prompt_tokens", "completion_tokens"):
        value = reported.get(name)
        if not _is_count(value):
            return None, f"{name} is not a count: {value!r:.60}"
        counts.append(value)
    for group, name in (
        ("prompt_tokens_details", "cached_tokens"),
        ("completion_tokens_details", "reasoning_tokens"),
    ):
        details = reported.get(group)
        value = details.get(name) if isinstance(details, dict) else None
        value = 0 if value is None else value
        if not _is_count(value):
            return None, f"{name} is not a count: {value!r:.60}"
        counts.append(value)
    prompt, completion, cached, reasoning = counts
    if cached > prompt:
        return None, f"cached_tokens {cached} over prompt_tokens {prompt}"
    return Usage(input=prompt, output=completion, cached=cached, reasoning=reasoning), ""


def compact(body: bytes) -> bytes:
    """The same JSON without line breaks outside strings; untouched when it has none."""
    if b"\n" not in body and b"\r" not in body:
        return body
    return _STRING_OR_SPACE.sub(_keep_string, body)


def error_body(body: bytes) -> bytes:
    """JSON for the body of an answer outside 2xx: itself, else its text, null when empty."""
    if not body:
        return b"null"
    try:
        _parse(body)
    except _Unreadable:
        return msgspec.json.encode(body[:MAX_TEXT_BYTES].decode("utf-8", errors="replace"))
    return compact(body)


def is_error(body: bytes) -> bool:
    """Whether it is an error as an OpenAI-compatible server words it."""
    try:
        parsed = _parse(body)
    except _Unreadable:
        return False
    return isinstance(parsed, dict) and ("error" in parsed or parsed.get("object") == "error")


class _Unreadable(ValueError):
    """Why the bytes are no JSON, or none that everybody who has to can read."""


def _parse(body: bytes) -> Any:
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and strictjson.depth(body) > MAX_DEPTH:
        raise _Unreadable(f"it is nested more than {MAX_DEPTH} levels deep")
    try:
        return _decode(body)
    except msgspec.ValidationError:
        # A number larger than this decoder takes.
        try:
            return strictjson.parse(body)
        except strictjson.NotJson as error:
            raise _Unreadable(f"it {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _Unreadable(f"not JSON: {str(error).removeprefix('JSON is malformed: ')}") from None


def _keep_string(match: re.Match[bytes]) -> bytes:
    token = match.group()
    return token if token.startswith(b'"') else b""


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= MAX_TOKENS
