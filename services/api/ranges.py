"""One byte range of a file, as RFC 9110 has it."""

from __future__ import annotations

import re

_ONE = re.compile(r"bytes=\s*(?:(\d{1,18})-(\d{1,18})?|-(\d{1,18}))\s*", re.ASCII)


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
        length = min(int(match[3]), size)
        if length == 0:
            raise Unsatisfiable
        return size - length, length
    first = int(match[1])
    last = size - 1 if match[2] is None else int(match[2])
    if match[2] is not None and last < first:
        return None
    if first >= size:
        raise Unsatisfiable
    return first, min(last, size - 1) - first + 1
