"""Reading `text/event-stream`: bytes in, in pieces of any size, the data of whole messages out."""

from __future__ import annotations

import re

_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventStream:
    """Keeps what is not yet a whole event; an event that the end of the stream cuts off never was one.

    Events of another type than `message`, and those without data, are nobody's message.
    """

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        """Pieces of a line whose end has not come."""
        self._data: list[bytes] = []
        self._type = b""
        self._started = False
        self._half = False
        """The last byte was a CR: a LF now is the rest of that line's end."""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the messages that this piece completes, in order."""
        if self._half and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._half = False
        self._half = self._half or chunk.endswith(b"\r")
        if _LINE_END.search(chunk) is None:
            self._rest.append(chunk)
            return []
        lines = _LINE_END.split(b"".join([*self._rest, chunk]))
        self._rest = [lines.pop()]
        messages = (self._line(line) for line in lines)
        return [message for message in messages if message]

    def _line(self, line: bytes) -> bytes | None:
        """Take one line; the data of the message it ends, if it ends one."""
        if not self._started:
            self._started = True
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line:
            field, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if field == b"data":
                self._data.append(value)
            elif field == b"event":
                self._type = value
            return None
        data, kind = b"\n".join(self._data), self._type
        self._data, self._type = [], b""
        return data if kind in (b"", b"message") else None
