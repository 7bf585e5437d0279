"""The multipart body of an upload, part by part, holding none of the file.

Every byte is looked at as it arrives; what belongs to the file goes on to the caller at once, the short
fields are kept. Parts may come in any order. A body that ends before its closing boundary, has parts we do
not know, or has one twice is refused. What RFC 2046 allows and hardly anybody sends is taken: text before the
first boundary and after the last, blanks behind a boundary, header lines that are folded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum

from python_multipart.multipart import parse_options_header

from services.api import refusals
from services.api.refusals import Refusal

FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
PLAIN_ENCODINGS = (b"binary", b"8bit", b"7bit")
MAX_FIELD_BYTES = 1_024
MAX_HEADER_BYTES = 32 * 1024
"""Long enough for any file name."""
MAX_PREAMBLE_BYTES = 64 * 1024
OVERHEAD_BYTES = 256 * 1024
"""What a body may be larger than its file: boundaries, headers, short fields."""

MAX_BOUNDARY_BYTES = 256
"""The standard has 70."""

_FOLD = re.compile(rb"\r\n[ \t]+")
_HEADER = re.compile(rb"([!-9;-~]+)[ \t]*:[ \t]*([^\r\n]*)")
_AFTER_BOUNDARY = re.compile(rb"--|[ \t]{0,255}\r\n")
_PERHAPS_AFTER_BOUNDARY = re.compile(rb"-?|[ \t]{0,255}\r?")


class _In(Enum):
    PREAMBLE = "preamble"
    HEADERS = "headers"
    DATA = "data"
    EPILOGUE = "epilogue"


class UploadForm:
    """Feed it the body; `fields` are complete after `end`."""

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise refusals.invalid(
                "Send the file as multipart/form-data with the parts purpose and file.", "file"
            )
        if len(boundary) > MAX_BOUNDARY_BYTES:
            raise _malformed()
        self._delimiter = b"\r\n--" + boundary
        self.fields: dict[str, str] = {}
        self.has_file = False
        self._name: str | None = None
        self._value = bytearray()
        self._before_parts = 0
        self._place = _In.PREAMBLE
        self._rest = b"\r\n"
        """What has come and cannot be told yet; the first boundary needs no line end of the body's own."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The pieces of the file that this piece of the body holds."""
        self._rest += data
        while self._place is not _In.EPILOGUE:
            if self._place is _In.HEADERS:
                if not self._take_headers():
                    return
                continue
            content, complete = self._take_content()
            if self._place is _In.PREAMBLE:
                self._before_parts += len(content)
                if self._before_parts > MAX_PREAMBLE_BYTES:
                    raise _malformed()
            elif self._name == "file":
                if content:
                    yield content
            else:
                self._value += content
                if len(self._value) > MAX_FIELD_BYTES:
                    raise refusals.invalid(f"The part {self._name} is too long.", self._name)
            if not complete:
                return
            if self._place is _In.DATA:
                self._part_end()
            self._place = _In.EPILOGUE if self._rest.startswith(b"--") else _In.HEADERS
            self._rest = self._rest.lstrip(b" \t")
        self._rest = b""

    def end(self) -> None:
        """The body is over; raises unless it was whole and had what an upload needs."""
        if self._place is not _In.EPILOGUE:
            raise refusals.invalid("The multipart body ended before its closing boundary.", "file")
        if not self.has_file:
            raise refusals.invalid("The part file is missing.", "file", "missing_required_parameter")
        if "purpose" not in self.fields:
            raise refusals.invalid("The part purpose is missing.", "purpose", "missing_required_parameter")

    def _take_content(self) -> tuple[bytes, bool]:
        """What comes before the next boundary, as far as it is there, and whether the boundary is.

        Then the rest begins behind it, with `--` or the end of its line.
        """
        rest, start = self._rest, 0
        while (at := rest.find(self._delimiter, start)) >= 0:
            after = at + len(self._delimiter)
            if _AFTER_BOUNDARY.match(rest, after):
                self._rest = rest[after:]
                return rest[:at], True
            if _PERHAPS_AFTER_BOUNDARY.fullmatch(rest, after):
                break
            start = at + 1
        if at < 0:
            at = max(start, len(rest) - len(self._delimiter) + 1)
        self._rest = rest[at:]
        return rest[:at], False

    def _take_headers(self) -> bool:
        """Whether the headers of a part, from the end of its boundary's line, are there in full."""
        end = self._rest.find(b"\r\n\r\n")
        if (len(self._rest) if end < 0 else end) > MAX_HEADER_BYTES:
            raise _malformed()
        if end < 0:
            return False
        lines = _FOLD.sub(b" ", self._rest[2:end]).split(b"\r\n") if end else []
        self._rest = self._rest[end + 4 :]
        headers = {}
        for line in lines:
            header = _HEADER.fullmatch(line)
            if header is None:
                raise _malformed()
            headers[header[1].lower()] = header[2]
        self._begin_part(headers)
        self._place = _In.DATA
        return True

    def _begin_part(self, headers: dict[bytes, bytes]) -> None:
        disposition = headers.get(b"content-disposition", b"")
        _, options = parse_options_header(disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if headers.get(b"content-transfer-encoding", b"binary").strip().lower() not in PLAIN_ENCODINGS:
            raise _malformed()
        if name == "file":
            if self.has_file:
                raise refusals.invalid("There are two parts named file; send one.", "file")
            if b"filename" not in disposition.lower():
                raise refusals.invalid("The part file has no filename; send it as a file.", "file")
            self.has_file = True
        elif name not in FIELDS:
            raise refusals.invalid(f"There is a part that is not known: {name[:64]!r}.", name[:64])
        elif name in self.fields:
            raise refusals.invalid(f"The part {name} is there twice.", name)
        self._name = name

    def _part_end(self) -> None:
        if self._name is not None and self._name != "file":
            self.fields[self._name] = bytes(self._value).decode("utf-8", "replace")
        self._value = bytearray()
        self._name = None


def _malformed() -> Refusal:
    return refusals.invalid("The multipart body is malformed.", "file")
