"""Behaviours: what the first words of a prompt make the simulated model do.

A prompt may begin with any number of these words, separated by white space; the first word that is not one
of them ends the list, and the rest is free (a label that keeps prompts apart, for instance). Durations are
in seconds.

=========================  ==========================================================================
`ok`                       an ordinary answer
`slow:N`                   takes N seconds longer
`status:CODE`              an HTTP error with OpenAI's error body; 403 has an empty body, 3xx a Location
`unknown-model`            404 saying that the model does not exist
`retry-after:N:K`          429 with `Retry-After: N`, for the first K calls
`hang`                     never answers
`drop`                     closes the connection without an answer
`reset`                    resets the connection without an answer
`half`                     headers and half of the body, then closes the connection
`drip:N`                   the body one byte at a time, N seconds apart
`usage:KIND`               a good answer with unusable usage: null, missing, negative, string, float,
                           huge, badtotal (only the sum is wrong), overcached (more cached than prompt)
`usage:P/C[/H[/R]]`        P prompt and C completion tokens, H of them cached, R of them reasoning
`big:N`                    N bytes of content
`empty`                    200 with the body `{}`
`nonjson`, `html`          200 with text that is not JSON
`nochoices`, `nochoice`    200 without `choices`; with an empty list of them
`nomessage`                200 with a choice whose message is null
`deep:N`                   a good answer with an extra field nested N deep
`gzip`                     a good answer, compressed although nobody asked
`json:TEXT`                200 with everything after the colon as the body, byte for byte
`tools:N[:M]`              N rounds of M tool calls each (M is 1 unless given), then a text
`args:KIND`                arguments of those calls: notjson, array, blank
`at:N`                     words after this one hold only in round N of a tool loop, counted from 0
=========================  ==========================================================================

`status`, `hang`, `drop`, `reset`, `half`, `empty`, `nonjson`, `html`, `nochoices`, `nochoice`, `nomessage`
and `unknown-model` take a last argument K: they hold for the first K calls with exactly this prompt, and
later ones are answered as if the word were not there.
"""

from __future__ import annotations

import re

import msgspec

_WORD = re.compile(r"\s*(\S+)")
_PLAIN_FAULTS = frozenset(
    {
        "hang",
        "drop",
        "reset",
        "half",
        "empty",
        "nonjson",
        "html",
        "nochoices",
        "nochoice",
        "nomessage",
        "unknown-model",
    }
)
_USAGE_KINDS = frozenset({"null", "missing", "negative", "string", "float", "huge", "badtotal", "overcached"})
_ARGUMENT_KINDS = frozenset({"notjson", "array", "blank"})
_COUNTS = re.compile(r"\d{1,15}(/\d{1,15}){1,3}")
_MAX_BYTES = 256 * 1024 * 1024
_MAX_SECONDS = 86_400.0


class Behaviour(msgspec.Struct, frozen=True, kw_only=True):
    """What the words of one prompt add up to; of two words of one kind the later holds."""

    fault: str = ""
    """Name of the word that replaces the ordinary answer, or empty."""
    times: int | None = None
    """The fault holds for this many calls of the prompt; None for all."""
    status: int = 0
    retry_after_s: float = 0.0
    slow_s: float = 0.0
    pause_s: float = 0.0
    """Between the bytes of a dripping answer."""
    rounds: int = 0
    calls: int = 1
    arguments: str = ""
    usage: str = ""
    content_bytes: int | None = None
    depth: int = 0
    body: str = ""

    def without_fault(self) -> Behaviour:
        return msgspec.structs.replace(self, fault="", times=None)


ORDINARY = Behaviour()


def parse(text: str, turn: int = 0) -> Behaviour:
    """The behaviour that `text` asks for in round `turn` of a tool loop. Never raises."""
    behaviour = ORDINARY
    holds = True
    at = 0
    while (match := _WORD.match(text, at)) is not None:
        word = match[1]
        if word.startswith("json:"):
            body = text[match.start(1) + len("json:") :]
            if not holds:
                return behaviour
            return msgspec.structs.replace(behaviour, fault="json", times=None, body=body)
        name, *arguments = word.split(":")
        if name == "at":
            number = _integers(arguments)
            if number is None or len(number) != 1:
                break
            holds = number[0] == turn
        else:
            changes = _changes(name, arguments)
            if changes is None:
                break
            if holds:
                behaviour = msgspec.structs.replace(behaviour, **changes)
        at = match.end()
    return behaviour


def _changes(name: str, arguments: list[str]) -> dict[str, object] | None:
    """The fields that one word sets; None if it is no behaviour."""
    numbers = _integers(arguments)
    if name in _PLAIN_FAULTS:
        if numbers is None or len(numbers) > 1:
            return None
        return {"fault": name, "times": numbers[0] if numbers else None}
    match name, arguments:
        case "ok", []:
            return {}
        case "slow", [seconds] if (pause := _seconds(seconds)) is not None:
            return {"slow_s": pause}
        case "drip", [seconds] if (pause := _seconds(seconds)) is not None:
            return {"fault": "drip", "times": None, "pause_s": pause}
        case "gzip", []:
            return {"fault": "gzip", "times": None}
        case "retry-after", [seconds, count] if (pause := _seconds(seconds)) is not None:
            if (calls := _integers([count])) is None:
                return None
            return {"fault": "status", "status": 429, "retry_after_s": pause, "times": calls[0]}
        case "usage", [kind] if kind in _USAGE_KINDS or _COUNTS.fullmatch(kind):
            return {"usage": kind}
        case "args", [kind] if kind in _ARGUMENT_KINDS:
            return {"arguments": kind}
    match name, numbers:
        case "status", [code] if 200 <= code <= 599:
            return {"fault": "status", "status": code, "times": None}
        case "status", [code, times] if 200 <= code <= 599:
            return {"fault": "status", "status": code, "times": times}
        case "tools", [rounds]:
            return {"rounds": rounds}
        case "tools", [rounds, each] if 0 < each <= 1000:
            return {"rounds": rounds, "calls": each}
        case "big", [size] if size <= _MAX_BYTES:
            return {"content_bytes": size}
        case "deep", [depth] if depth <= _MAX_BYTES:
            return {"depth": depth}
    return None


def _integers(arguments: list[str]) -> list[int] | None:
    if all(argument.isascii() and argument.isdigit() and len(argument) < 16 for argument in arguments):
        return [int(argument) for argument in arguments]
    return None


def _seconds(argument: str) -> float | None:
    if re.fullmatch(r"\d{1,6}(\.\d{1,6})?|\.\d{1,6}", argument) is None:
        return None
    seconds = float(argument)
    return seconds if seconds <= _MAX_SECONDS else None
