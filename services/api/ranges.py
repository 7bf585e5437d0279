"""One byte range of a file, as RFC 9110 has it."""

from __future__ import annotations

import re

_ONE = re.compile(r"bytes=\s*(?:(\d+)-(\d+)?|-(\d+))\s*", re.ASCII)
_DIGITS = 18
"""Numbers longer than this are greater than any size."""


class Unsatisfiable(Exception):
    """No byte of the file lies in the range."""


def parse(header: str | None, size: int) -> tuple[int, int] | None:
    """Offset and length of what is asked for; None for the whole file.

    A header that is malformed or names several ranges is ignored, as the standard allows.
    """
    match = _ONE.fullmatch(header or "")
    if match is None:
        return None
    if match[3] is not None:
        length = min(_number(match[3]), size)
        if length == 0:
            raise Unsatisfiable
        return size - length, length
    if match[2] is not None and _greatness(match[2]) < _greatness(match[1]):
        return None
    first = _number(match[1])
    last = size - 1 if match[2] is None else min(_number(match[2]), size - 1)
    if first >= size:
        raise Unsatisfiable
    return first, last - first + 1


def _number(digits: str) -> int:
    """A position, or one beyond every file: numbers as long as a header are not computed with."""
    length, digits = _greatness(digits)
    return int(digits or "0") if length <= _DIGITS else 10**_DIGITS


def _greatness(digits: str) -> tuple[int, str]:
    """Numbers are in the order of these, however long."""
    digits = digits.lstrip("0")
    return len(digits), digits
