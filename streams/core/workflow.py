"""A record that is a workflow: its callback says what to run next, step by step.

    flow = Workflow(config, model)                  `resume` puts it behind an accepted step
    flow.request(custom_id)                         the body of the callback's next call
    action = flow.answered(body)                    Run, or Ended
    flow.may_start(), flow.finished(request, …)     for each request of a Run, in any order
    flow.end_step()                                 all have finished: the next callback is due

Every request that succeeded is billed, whatever becomes of the record, so the list of them is part of every
end and of every step that is written down.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec
from msgspec import Raw

from schemas.batches import BatchUsage, InputDetails, OutputDetails
from schemas.errors import RecordCode, RunCode
from schemas.money import Price, Usage
from schemas.records import Billed, Step
from schemas.workflows import (
    CallbackAnswer,
    CallbackRequest,
    CompletedAnswer,
    ContinueAnswer,
    ErrorPart,
    FailedAnswer,
    RequestResult,
    ResponsePart,
    WorkflowOutput,
    WorkflowReport,
)
from streams.core import bodies, pricing
from streams.core.strictjson import NotJson, parse
from streams.core.toolconfig import WorkflowConfig

MAX_REQUEST_ID = 128
"""Characters; ids are part of usage rows and of every step written down."""

MAX_RESULTS_BYTES = 32 * 1024 * 1024
"""Of one step, together: as much as one answer of a model may have."""

MAX_MESSAGE = 4_096
"""Of a callback's own error message, this much enters the line."""

UNBEGUN = WorkflowReport(0, 0, BatchUsage())
"""Of a record that ended before anything of it was finished."""

_decode_answer = msgspec.json.Decoder(CallbackAnswer).decode
_encode = msgspec.json.Encoder().encode
_NONE = Raw(b"null")


class Request(NamedTuple):
    """One request of a step. `refusal` is set when it will not run, and says why."""

    id: str
    body: bytes
    refusal: ErrorPart | None


class Run(NamedTuple):
    """Run these at once; those refused come back as failed."""

    requests: list[Request]


class Completed(NamedTuple):
    output: bytes


class Ended(NamedTuple):
    """The record fails."""

    code: str
    message: str


class Malformed(Exception):
    """The callback's answer is none of the three it may give; the message says why."""


class Workflow:
    """The state of one workflow record. `step` is the number of the callback that is due."""

    def __init__(self, config: WorkflowConfig, model: str) -> None:
        self._config = config
        self._model = model
        self.step = 0
        self.requests = 0
        self.tokens = 0
        self.billed: list[Billed] = []
        self.unbilled: list[str] = []
        """Ids of the other requests of finished steps."""
        self._used: set[str] = set()
        """Ids of all requests of finished steps: none is used again, and so many were asked for."""
        self.results = b"[]"
        self._open: dict[str, RequestResult | None] = {}
        self._size = 0
        """Bytes of the results in `_open`."""

    def resume(self, step: Step, results: bytes) -> None:
        """Go on behind a step that was written down."""
        self.step, self.requests = step.step, step.requests
        self.billed, self.unbilled = list(step.billed), list(step.unbilled)
        self._used = {entry.id for entry in self.billed} | set(self.unbilled)
        self.tokens = sum(entry.usage.input + entry.usage.output for entry in step.billed if entry.usage)
        self.results = results

    def request(self, custom_id: str) -> bytes:
        """The body of the callback's next call; the same when it is called again."""
        context = _NONE if self._config.context is None else Raw(self._config.context)
        return _encode(CallbackRequest(custom_id, context, self.step, Raw(self.results)))

    def answered(self, body: bytes) -> Run | Completed | Ended:
        """What follows from the callback's answer. Raises Malformed."""
        match _read(body):
            case CompletedAnswer(output):
                return Completed(bytes(output))
            case FailedAnswer(error):
                message = error.message if error.code is None else f"{error.code}: {error.message}"
                return Ended(RunCode.WORKFLOW_FAILED, message[:MAX_MESSAGE])
            case ContinueAnswer(requests):
                if self.step >= self._config.max_steps:
                    return _over(f"it wants more than {self._config.max_steps} steps")
                if not self._used.isdisjoint(request.id for request in requests):
                    raise Malformed("the id of a request was used in an earlier step")
                if len(self._used) + len(requests) > self._config.max_requests:
                    return _over(f"it wants more than {self._config.max_requests} requests")
                run = [self._request(item.id, bytes(item.body)) for item in requests]
                self._open = {request.id: None for request in run}
                for request in run:
                    if request.refusal is not None:
                        self._open[request.id] = RequestResult(request.id, "failed", None, request.refusal)
                return Run(run)

    def may_start(self) -> bool:
        """Whether another request may start: asked before each, since those before it use up tokens."""
        if self.tokens >= self._config.max_tokens or self.too_large is not None:
            return False
        self.requests += 1
        return True

    @property
    def size(self) -> int:
        """Bytes of results held."""
        return len(self.results) + self._size

    @property
    def too_large(self) -> Ended | None:
        """Why the record ends, once the results of the step have come to too much."""
        if self._size <= MAX_RESULTS_BYTES:
            return None
        return _over(f"the results of a step are over {MAX_RESULTS_BYTES >> 20} MiB")

    @property
    def out_of_tokens(self) -> Ended:
        return _over(f"it has used its {self._config.max_tokens} tokens")

    def succeeded(self, request: Request, status: int, body: bytes, usage: Usage | None, why: str) -> None:
        """A request has its answer; `why` says why `usage` is None."""
        self.billed.append(Billed(self.step, request.id, usage, why))
        if usage is not None:
            self.tokens += usage.input + usage.output
        self._answered(request, "succeeded", status, body)

    def refused(self, request: Request, status: int, body: bytes) -> None:
        """The model server answered with an HTTP error; `body` is its JSON."""
        self._answered(request, "failed", status, body)

    def failed(self, request: Request, code: str, message: str) -> None:
        """A request ended with one of our codes; the record goes on."""
        self._open[request.id] = RequestResult(request.id, "failed", None, ErrorPart(code, message))

    def end_step(self) -> None:
        """All requests of the step have an end."""
        assert None not in self._open.values(), "a request of the step has no end"
        self.results = _encode(list(self._open.values()))
        self._used.update(self._open)
        self.unbilled += [
            request_id
            for request_id, result in self._open.items()
            if result is not None and result.status != "succeeded"
        ]
        self._open = {}
        self._size = 0
        self.step += 1

    def report(self, price: Price) -> WorkflowReport:
        # A step that was begun counts, whether or not the record outlived it.
        return report(self.step + bool(self._open), self.requests, self.billed, price)

    def output(self, output: bytes, price: Price) -> bytes:
        """The body of the output line."""
        return _encode(WorkflowOutput(model=self._model, output=Raw(output), openrelay=self.report(price)))

    def _answered(
        self, request: Request, status: Literal["succeeded", "failed"], code: int, body: bytes
    ) -> None:
        self._size += len(body)
        if self.too_large is not None:
            body = b"null"  # nobody will be shown it
        self._open[request.id] = RequestResult(request.id, status, ResponsePart(code, Raw(body)), None)

    def _request(self, request_id: str, body: bytes) -> Request:
        found = parse(body)
        assert isinstance(found, dict)
        refusal = None
        if "openrelay" in found:
            refusal = ErrorPart(RecordCode.INVALID_OPENRELAY, "a request of a workflow cannot have openrelay")
        elif found.get("stream") is True:
            refusal = ErrorPart(RecordCode.STREAM_NOT_SUPPORTED, "stream is not supported in a batch")
        elif "model" not in found:
            body = bodies.with_members(body, {"model": _encode(self._model)})
        elif found["model"] != self._model:
            refusal = ErrorPart(RecordCode.MODEL_MISMATCH, f"the record's model is {self._model}")
        return Request(request_id, body, refusal)


def report(steps: int, requests: int, billed: list[Billed], price: Price) -> WorkflowReport:
    """What a workflow record's line says of its requests; each is priced, and rounded, by itself."""
    usages = [entry.usage for entry in billed if entry.usage is not None]
    total_in, total_out = sum(u.input for u in usages), sum(u.output for u in usages)
    usage = BatchUsage(
        input_tokens=total_in,
        input_tokens_details=InputDetails(sum(u.cached for u in usages)),
        output_tokens=total_out,
        output_tokens_details=OutputDetails(sum(u.reasoning for u in usages)),
        total_tokens=total_in + total_out,
        cost_nano_usd=sum(sum(pricing.cost_parts(u, price)) for u in usages),
        unmetered_requests=len(billed) - len(usages),
    )
    return WorkflowReport(steps, requests, usage)


def _read(body: bytes) -> ContinueAnswer | CompletedAnswer | FailedAnswer:
    try:
        parse(body)
        answer = _decode_answer(body)
    except NotJson as error:
        raise Malformed(f"it {error.unquoted}") from None
    except msgspec.ValidationError:
        raise Malformed("it is not an answer a callback may give") from None
    if isinstance(answer, ContinueAnswer):
        if not answer.requests:
            raise Malformed("it continues without requests")
        ids = [request.id for request in answer.requests]
        if len(set(ids)) != len(ids):
            raise Malformed("two requests have one id")
        if not all(0 < len(each) <= MAX_REQUEST_ID and each.isprintable() for each in ids):
            raise Malformed(f"request ids are 1 to {MAX_REQUEST_ID} printable characters")
        if not all(bytes(request.body).startswith(b"{") for request in answer.requests):
            raise Malformed("the body of a request is not an object")
    return answer


def _over(message: str) -> Ended:
    return Ended(RunCode.WORKFLOW_LIMIT_EXCEEDED, f"the workflow exceeds its limits: {message}")
