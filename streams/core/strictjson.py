"""JSON as the standard has it, and nothing that two readers could read differently.

Beyond the grammar: UTF-8 only, no key twice in one object, no unpaired surrogates, no NaN or Infinity,
nesting of at most `MAX_DEPTH`. Integers of any length are taken. A number with a fraction or an exponent that
a double cannot hold is refused where `finite` is asked for, as readers make different things of it; elsewhere
it is read as infinity, which is no integer and so fits no field of ours. Depth is measured before parsing,
because how deep a parser gets depends on its caller's stack.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from itertools import accumulate
from typing import Any, NoReturn

MAX_DEPTH = 100

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_STEPS = bytes(1 if c in b"[{" else 255 if c in b"]}" else 0 for c in range(256))
_NOT_BRACKETS = bytes(c for c in range(256) if c not in b"[]{}")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_HUGE = 10**4_299
"""Stands for an integer too long for the interpreter to read in linear time; only its sign is ever asked."""


class NotJson(ValueError):
    """Why the bytes are refused: what to say of them, as in `the record {error}`."""

    def __init__(self, said: str, unquoted: str = "") -> None:
        super().__init__(said)
        self.unquoted = unquoted or said
        """The same without a word of theirs."""


def parse(data: bytes, *, finite: bool = False) -> object:
    """The value of a JSON text. Raises NotJson, and no other exception, whatever the bytes are."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise NotJson(f"is not UTF-8 at byte {error.start + 1}") from None
    if depth(data) > MAX_DEPTH:
        raise NotJson(f"is nested more than {MAX_DEPTH} levels deep")
    try:
        value = (_FINITE if finite else _DECODER).decode(text)
    except json.JSONDecodeError as error:
        if text.startswith("\ufeff"):
            raise NotJson("is not JSON: it begins with a byte order mark") from None
        raise NotJson(f"is not JSON: {error.msg.removesuffix(' at')} at character {error.pos + 1}") from None
    except NotJson:
        raise
    except ValueError:
        # The interpreter's limit on the digits of one integer.
        value = (_FINITE_PATIENT if finite else _PATIENT).decode(text)
    if _SURROGATE.search(data) is not None and _unpaired(value):
        raise NotJson("contains half of a surrogate pair")
    return value


def depth(data: bytes) -> int:
    """An upper bound of the nesting that is exact for JSON, and exact enough when it is at most MAX_DEPTH."""
    brackets = data.count(b"[") + data.count(b"{")
    if brackets <= MAX_DEPTH:
        return brackets
    steps = array("b", _STRING.sub(b"", data).translate(_STEPS, _NOT_BRACKETS))
    return max(accumulate(steps), default=0)


def _unpaired(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen = set()
        for key, _ in pairs:
            if key in seen:
                raise NotJson(
                    f"has the key {key[:64]!r} twice in one object", "has a key twice in one object"
                )
            seen.add(key)
    return members


def _float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise NotJson("contains a number too large to be represented")
    return number


def _integer(text: str) -> int:
    if len(text) <= 4_300:
        return int(text)
    return -_HUGE if text[0] == "-" else _HUGE


def _constant(text: str) -> NoReturn:
    raise NotJson(f"contains {text}, which is not JSON")


_STRICT: Any = {"object_pairs_hook": _object, "parse_constant": _constant}
_DECODER = json.JSONDecoder(**_STRICT)
_PATIENT = json.JSONDecoder(**_STRICT, parse_int=_integer)
_FINITE = json.JSONDecoder(**_STRICT, parse_float=_float)
_FINITE_PATIENT = json.JSONDecoder(**_STRICT, parse_float=_float, parse_int=_integer)
