"""The multipart body of an upload, part by part, holding none of the file.

The parser sees every byte as it arrives; what belongs to the file goes on to the caller at once, the short
fields are kept. Parts may come in any order. A body that ends before its closing boundary, has parts we do
not know, or has one twice is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

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

# It logs what it refuses, byte by byte, at warning level; the refusal itself says it all.
logging.getLogger("python_multipart").setLevel(logging.ERROR)


class UploadForm:
    """Feed it the body; `fields` are complete after `end`."""

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise refusals.invalid(
                "Send the file as multipart/form-data with the parts purpose and file.", "file"
            )
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._part_begin,
                    "on_part_data": self._part_data,
                    "on_part_end": self._part_end,
                    "on_header_field": self._header_field,
                    "on_header_value": self._header_value,
                    "on_header_end": self._header_end,
                    "on_headers_finished": self._headers_finished,
                    "on_end": self._end,
                },
                max_header_size=MAX_HEADER_BYTES,
            )
        except FormParserError:
            raise _malformed() from None
        self.fields: dict[str, str] = {}
        self.has_file = False
        self._name: str | None = None
        self._value = bytearray()
        self._header: tuple[bytearray, bytearray] = (bytearray(), bytearray())
        self._headers: dict[bytes, bytes] = {}
        self._file_pieces: list[bytes] = []
        self._before_parts = 0
        self._started = False
        self._ended = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The pieces of the file that this piece of the body holds."""
        if not self._started:
            self._before_parts += len(data)
            if self._before_parts > MAX_PREAMBLE_BYTES + len(data):
                raise _malformed()
        try:
            self._parser.write(data)
        except FormParserError:
            raise _malformed() from None
        pieces, self._file_pieces = self._file_pieces, []
        yield from pieces

    def end(self) -> None:
        """The body is over; raises unless it was whole and had what an upload needs."""
        if not self._ended:
            raise refusals.invalid("The multipart body ended before its closing boundary.", "file")
        if not self.has_file:
            raise refusals.invalid("The part file is missing.", "file", "missing_required_parameter")
        if "purpose" not in self.fields:
            raise refusals.invalid("The part purpose is missing.", "purpose", "missing_required_parameter")

    def _part_begin(self) -> None:
        self._started = True
        self._headers = {}

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header[0].extend(data[start:end])

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._header[1].extend(data[start:end])

    def _header_end(self) -> None:
        name, value = self._header
        self._headers[bytes(name).lower()] = bytes(value)
        self._header = (bytearray(), bytearray())

    def _headers_finished(self) -> None:
        disposition = self._headers.get(b"content-disposition", b"")
        _, options = parse_options_header(disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._headers.get(b"content-transfer-encoding", b"binary").lower() not in (
            b"binary",
            b"8bit",
            b"7bit",
        ):
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

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        piece = data[start:end]
        if self._name == "file":
            self._file_pieces.append(piece)
            return
        self._value += piece
        if len(self._value) > MAX_FIELD_BYTES:
            raise refusals.invalid(f"The part {self._name} is too long.", self._name)

    def _part_end(self) -> None:
        if self._name is not None and self._name != "file":
            self.fields[self._name] = bytes(self._value).decode("utf-8", "replace")
        self._value = bytearray()
        self._name = None

    def _end(self) -> None:
        self._ended = True


def _malformed() -> Refusal:
    return refusals.invalid("The multipart body is malformed.", "file")
