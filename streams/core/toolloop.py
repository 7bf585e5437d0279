"""The loop of a record whose tools we run: what comes after each answer of the model.

    loop = ToolLoop(max_rounds)
    loop, action = loop.answered(body, answer)      RunTools, or Done
    loop = loop.ran(action, contents)               then the model is called with `loop.request(body)`

The assistant message goes back exactly as the model returned it, followed by one message per call. An answer
that asks for tools in a way nobody could run (no calls, no ids, an id twice) is no answer: see `fault`.
Usage is summed over all turns; one turn whose usage cannot be read makes the record unmetered.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from msgspec import Raw

from schemas.money import Usage
from schemas.tools import ToolCall, ToolMessage
from streams.core import bodies
from streams.core.answers import Answer


class _Message(msgspec.Struct):
    tool_calls: Raw


class _Choice(msgspec.Struct):
    message: Raw


class _Completion(msgspec.Struct):
    choices: list[_Choice]


_decode_completion = msgspec.json.Decoder(_Completion).decode
_decode_message = msgspec.json.Decoder(_Message).decode
_decode_calls = msgspec.json.Decoder(list[ToolCall]).decode
_encode = msgspec.json.Encoder().encode


class RunTools(NamedTuple):
    """Run these calls; `written` is the model's `tool_calls`, byte for byte."""

    calls: list[ToolCall]
    written: bytes
    message: bytes
    """The assistant message they are from."""


class Done(NamedTuple):
    """The record's output."""

    body: bytes
    usage: Usage | None
    unmetered: str


class Totals(NamedTuple):
    """Usage of several calls added up; `usage` is None once one of them cannot be billed."""

    usage: Usage | None = Usage(0, 0)
    unmetered: str = ""

    def plus(self, usage: Usage | None, unmetered: str) -> Totals:
        if self.usage is None:
            return self
        if usage is None:
            return Totals(None, unmetered)
        return Totals(
            Usage(
                input=self.usage.input + usage.input,
                output=self.usage.output + usage.output,
                cached=self.usage.cached + usage.cached,
                reasoning=self.usage.reasoning + usage.reasoning,
            )
        )


class ToolLoop(NamedTuple):
    """The loop so far. `messages` are what the customer's own are followed by."""

    max_rounds: int
    rounds: int = 0
    messages: tuple[bytes, ...] = ()
    totals: Totals = Totals()

    def fault(self, answer: Answer) -> str:
        """Why an answer cannot be gone on with, empty when it can."""
        if not self._wants_tools(answer):
            return ""
        message = answer.parsed["choices"][0]["message"]
        try:
            calls = msgspec.convert(message.get("tool_calls"), list[ToolCall])
        except (msgspec.ValidationError, AttributeError):
            return "it asks for tools without usable tool_calls"
        if not calls:
            return "it asks for tools and names none"
        if len({call.id for call in calls}) != len(calls):
            return "it has two tool calls with one id"
        return ""

    def answered(self, body: bytes, answer: Answer) -> tuple[ToolLoop, RunTools | Done]:
        """What follows from an answer without `fault`; `body` is its bytes."""
        loop = self._replace(totals=self.totals.plus(answer.usage, answer.unmetered))
        if not self._wants_tools(answer):
            return loop, loop._done(body)
        message = bytes(_decode_completion(body).choices[0].message)
        written = bytes(_decode_message(message).tool_calls)
        return loop, RunTools(_decode_calls(written), written, message)

    def ran(self, action: RunTools, contents: list[str]) -> ToolLoop:
        """The tools have answered, in the order of the calls."""
        told = [
            _encode(ToolMessage(call.id, content))
            for call, content in zip(action.calls, contents, strict=True)
        ]
        return self._replace(rounds=self.rounds + 1, messages=(*self.messages, action.message, *told))

    def request(self, body: bytes) -> bytes | None:
        """The body of the next call, from the record's; None when that has no list of messages."""
        if not self.messages:
            return body
        return bodies.with_appended(body, "messages", self.messages)

    @property
    def size(self) -> int:
        """Bytes held."""
        return sum(map(len, self.messages))

    def _wants_tools(self, answer: Answer) -> bool:
        choice = answer.parsed["choices"][0]
        return self.rounds < self.max_rounds and choice.get("finish_reason") == "tool_calls"

    def _done(self, body: bytes) -> Done:
        usage, unmetered = self.totals
        if self.rounds:
            body = bodies.with_members(
                body, {"usage": _usage_json(usage), "openrelay": b'{"tool_rounds":%d}' % self.rounds}
            )
        return Done(body, usage, unmetered)


def _usage_json(usage: Usage | None) -> bytes:
    """Usage as an answer reports it; null when it is not known, so that nobody bills a part of it."""
    if usage is None:
        return b"null"
    return _encode(
        {
            "prompt_tokens": usage.input,
            "completion_tokens": usage.output,
            "total_tokens": usage.input + usage.output,
            "prompt_tokens_details": {"cached_tokens": usage.cached},
            "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
        }
    )
