"""Whether a record may run, and if not, the one code that says why.

Checks are made in the order of `RecordCode`; the first that fails decides. Two of them depend on the
records before: a custom_id may be used again when its earlier use was rejected, and the batch's model is that
of the first record that passes everything else and is served.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container, Iterator

import msgspec

from schemas.errors import RecordCode
from schemas.records import Rejected
from schemas.settings import Egress, Limits
from streams.core.strictjson import NotJson, parse
from streams.core.toolconfig import ConfigFault, UrlPolicy, check_openrelay
from streams.core.validate.lines import Line, Lines

MAX_CUSTOM_ID = 512
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class TooManyRecords(Exception):
    """The file holds more records than a batch may."""


class Accepted(msgspec.Struct, frozen=True):
    """A record that will run. `length` bytes from `offset` of the file are its line."""

    index: int
    number: int
    custom_id: str
    offset: int
    length: int


class _Fault(Exception):
    def __init__(self, code: str, param: str | None, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.message = message
        self.custom_id = custom_id


class Validator:
    """Judges the records of one batch, in order. Memory grows by a few dozen bytes a record.

    `feed` and `end` raise UnsupportedEncoding for UTF-16 and TooManyRecords past the limit.
    """

    def __init__(
        self,
        *,
        endpoint: str,
        models: Container[str],
        workflows_enabled: bool,
        egress: Egress,
        limits: Limits,
    ) -> None:
        self._endpoint = endpoint
        self._models = models
        self._workflows_enabled = workflows_enabled
        self._policy = UrlPolicy(egress)
        self._max_records = limits.max_records
        self._max_bytes = limits.max_record_bytes
        self._lines = Lines(limits.max_record_bytes)
        self._used: set[bytes] = set()
        self.model: str | None = None
        """The batch's model, once a record has fixed it."""
        self.total = 0
        self.rejected = 0

    def feed(self, chunk: bytes) -> Iterator[Accepted | Rejected]:
        for line in self._lines.feed(chunk):
            yield self.check(line)

    def end(self) -> Iterator[Accepted | Rejected]:
        for line in self._lines.end():
            yield self.check(line)

    def check(self, line: Line) -> Accepted | Rejected:
        """Judge one line; lines must come in order."""
        if self.total == self._max_records:
            raise TooManyRecords
        self.total += 1
        try:
            if line.data is None:
                raise _Fault(
                    RecordCode.RECORD_TOO_LARGE, None, f"the record is larger than {self._max_bytes:,} bytes"
                )
            custom_id = self._judge(line.data)
        except _Fault as fault:
            self.rejected += 1
            return Rejected(
                index=line.index,
                line=line.number,
                code=fault.code,
                message=fault.message,
                param=fault.param,
                custom_id=fault.custom_id,
            )
        return Accepted(line.index, line.number, custom_id, line.offset, len(line.data))

    def _judge(self, data: bytes) -> str:
        try:
            record = parse(data, finite=True)
        except NotJson as error:
            raise _Fault(RecordCode.INVALID_JSON, None, f"the record {error}") from None
        if not isinstance(record, dict):
            raise _Fault(RecordCode.INVALID_RECORD, None, "the record is not a JSON object")
        custom_id = _custom_id(record)
        used = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
        if used in self._used:
            raise _Fault(
                RecordCode.DUPLICATE_CUSTOM_ID,
                "custom_id",
                "custom_id is already used by an earlier record",
                custom_id,
            )
        try:
            self._judge_rest(record)
        except _Fault as fault:
            fault.custom_id = custom_id
            raise
        self._used.add(used)
        return custom_id

    def _judge_rest(self, record: dict[str, object]) -> None:
        if record.get("method") != "POST":
            raise _Fault(RecordCode.INVALID_METHOD, "method", 'method must be "POST"')
        if record.get("url") != self._endpoint:
            raise _Fault(
                RecordCode.URL_MISMATCH, "url", f"url must be the batch's endpoint, {self._endpoint}"
            )
        body = record.get("body")
        if not isinstance(body, dict):
            raise _Fault(RecordCode.INVALID_BODY, "body", "body must be an object")
        self._judge_extension(body)
        self._judge_model(body)

    def _judge_extension(self, body: dict[str, object]) -> None:
        if "tool_config" in body:
            raise _Fault(
                RecordCode.TOOL_CONFIG_MOVED,
                "body.tool_config",
                "tool_config now lives under openrelay: body.openrelay.tool_config",
            )
        if "openrelay" not in body:
            return
        try:
            check_openrelay(
                body["openrelay"],
                endpoint=self._endpoint,
                workflows_enabled=self._workflows_enabled,
                policy=self._policy,
            )
        except ConfigFault as fault:
            raise _Fault(fault.code, f"body.{fault.param}", fault.message) from None

    def _judge_model(self, body: dict[str, object]) -> None:
        model = body.get("model")
        if not isinstance(model, str) or not model:
            raise _Fault(RecordCode.MISSING_MODEL, "body.model", "body.model must name a model")
        if self.model is None:
            if model not in self._models:
                raise _Fault(
                    RecordCode.MODEL_NOT_FOUND, "body.model", f"the model {_brief(model)} is not served here"
                )
        elif model != self.model:
            raise _Fault(
                RecordCode.MODEL_MISMATCH,
                "body.model",
                f"the batch runs {self.model}; {_brief(model)} needs a batch of its own",
            )
        if body.get("stream") is True:
            raise _Fault(RecordCode.STREAM_NOT_SUPPORTED, "body.stream", "stream is not supported in a batch")
        self.model = model


def _custom_id(record: dict[str, object]) -> str:
    custom_id = record.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        why = "custom_id must be a string that is not empty"
    elif len(custom_id) > MAX_CUSTOM_ID:
        why = f"custom_id is longer than {MAX_CUSTOM_ID} characters"
    elif _CONTROL.search(custom_id) is not None:
        why = "custom_id contains control characters"
    else:
        return custom_id
    raise _Fault(RecordCode.INVALID_CUSTOM_ID, "custom_id", why)


def _brief(model: str) -> str:
    return repr(model if len(model) <= 100 else model[:100] + "…")
