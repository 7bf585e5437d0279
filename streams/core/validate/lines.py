"""The physical lines of a JSONL file that hold a record, from chunks of any size.

Lines end at byte 0x0A and nowhere else. A byte-order mark at the very start and a carriage return before the
line end are dropped; lines of only spaces, tabs and carriage returns are counted as lines but hold no record.
Of a line over the limit no more is kept than the limit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

_BOM = b"\xef\xbb\xbf"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_BLANKS = b" \t\r"
_NOT_BLANK = re.compile(rb"[^ \t\r\n]")


class UnsupportedEncoding(Exception):
    """The file says of itself that it is UTF-16."""


class Line(msgspec.Struct, frozen=True):
    """A line that holds a record.

    `index` counts such lines from 0, `number` all lines from 1, `offset` is where the line starts in the
    file, `data` its bytes without the line end, None when they are over the limit.
    """

    index: int
    number: int
    offset: int
    data: bytes | None


class Lines:
    """Feed it the file piece by piece, then `end` it. Raises UnsupportedEncoding for UTF-16."""

    def __init__(self, max_bytes: int) -> None:
        self._max = max_bytes
        self._start = b""
        self._started = False
        self._index = 0
        self._number = 1
        self._offset = 0
        """Of the first byte not yet looked at."""
        self._kept: list[bytes] = []
        self._length = 0
        """Of the line under way, kept or not."""
        self._blank = True

    def feed(self, chunk: bytes) -> Iterator[Line]:
        if not self._started:
            self._start += chunk
            if len(self._start) < len(_BOM):
                return
            chunk = self._begin()
        first = chunk.find(b"\n")
        if first < 0:
            self._keep(chunk)
            return
        self._keep(chunk[:first])
        yield from self._close()
        last = chunk.rfind(b"\n")
        position = first + 1
        base = self._offset - position
        while position < last and (found := _NOT_BLANK.search(chunk, position, last)) is not None:
            start = chunk.rfind(b"\n", position - 1, found.start()) + 1
            self._number += chunk.count(b"\n", position, start)
            end = chunk.find(b"\n", start)
            yield self._line(base + start, chunk[start:end])
            self._number += 1
            position = end + 1
        self._number += chunk.count(b"\n", position, last + 1)
        self._offset = base + last + 1
        self._keep(chunk[last + 1 :])

    def end(self) -> Iterator[Line]:
        """The last line, when the file does not end with a line end."""
        if not self._started:
            yield from self.feed(self._begin())
        yield from self._close()

    def _begin(self) -> bytes:
        self._started = True
        start, self._start = self._start, b""
        if start.startswith(_UTF_16):
            raise UnsupportedEncoding
        if start.startswith(_BOM):
            self._offset = len(_BOM)
            return start[len(_BOM) :]
        return start

    def _keep(self, piece: bytes) -> None:
        if not piece:
            return
        self._length += len(piece)
        self._blank = self._blank and not piece.strip(_BLANKS)
        # One byte over, because the last one may be a carriage return that does not count.
        if self._length > self._max + 1:
            self._kept.clear()
        else:
            self._kept.append(piece)

    def _close(self) -> Iterator[Line]:
        data = b"".join(self._kept) if self._length <= self._max + 1 else None
        start, length, blank = self._offset, self._length, self._blank
        self._kept, self._length, self._blank = [], 0, True
        if not blank:
            yield self._line(start, data)
        self._number += 1
        self._offset = start + length + 1

    def _line(self, offset: int, data: bytes | None) -> Line:
        if data is not None:
            data = data.removesuffix(b"\r")
            if len(data) > self._max:
                data = None
        line = Line(self._index, self._number, offset, data)
        self._index += 1
        return line
