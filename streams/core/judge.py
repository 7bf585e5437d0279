"""What one model call means for its record and for the server it went to.

A call ends in an `Outcome`; `judge` turns it into the record's end or another try. Whose fault it was
decides: the caller's (4xx) ends the record at once, the server's (5xx, broken connections, unreadable
answers) uses up an attempt, ours (wrong key, unknown model) and overload (429, 503, a server that cannot be
reached) use none. A 403 is ours only when the server also refuses our key for its list of models: otherwise
it has refused this one request. A 404 as any web server gives it is ours when the list of models is not there
either: the address is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from schemas.errors import RunCode
from streams.core import answers
from streams.core.answers import Answer, Unusable

MAX_WAIT_S = 60.0


class Reply(NamedTuple):
    """The server answered. `retry_after_s` from its header, None when absent."""

    status: int
    body: bytes
    request_id: str | None
    retry_after_s: float | None


class Broken(NamedTuple):
    """The request was sent and the connection failed, or the server's health went under it."""

    reason: str


class Unreachable(NamedTuple):
    """No connection could be opened: the request was never sent."""

    reason: str


class TimedOut(NamedTuple):
    """The call's own time limit passed."""


Outcome = Reply | Broken | Unreachable | TimedOut


class Server(Enum):
    """What the outcome says of the endpoint."""

    GOOD = "good"
    OVERLOADED = "overloaded"
    REFUSING = "refusing"
    """Overloaded, and it says so."""
    FAILING = "failing"
    OUT = "out"
    MISCONFIGURED = "misconfigured"


class Again(NamedTuple):
    """The record runs again after `wait_s`; `attempt` says whether this call counts as one."""

    wait_s: float
    attempt: bool


class Succeeded(NamedTuple):
    reply: Reply
    answer: Answer


class HttpFailure(NamedTuple):
    """An error line with the server's own status and body."""

    reply: Reply


class CodedFailure(NamedTuple):
    """An error line with one of our codes."""

    code: str
    message: str


End = Succeeded | HttpFailure | CodedFailure


class Judgement(NamedTuple):
    server: Server
    record: End | Again


def judge(
    outcome: Outcome,
    *,
    endpoint: str,
    attempts: int,
    max_attempts: int,
    backoff_s: float,
    jitter: float,
    key_accepted: bool = False,
    no_such_route: bool = False,
    fault: Callable[[Answer], str] | None = None,
) -> Judgement:
    """Decide on a call of a record that had `attempts` counted attempts before this one.

    `jitter` in [0, 1) spreads the waits of records that failed together; `key_accepted` says, for a 403, that
    the server took our key elsewhere, `no_such_route`, for a 404, that the address is wrong; `fault` says why
    an answer cannot be used for what was asked, if so.
    """

    def retry(server: Server, last: End) -> Judgement:
        if attempts + 1 >= max_attempts:
            return Judgement(server, last)
        wait_s = min(MAX_WAIT_S, backoff_s * 2.0**attempts) * (0.5 + jitter / 2)
        return Judgement(server, Again(wait_s, attempt=True))

    match outcome:
        case TimedOut():
            return Judgement(
                Server.OVERLOADED,
                CodedFailure(
                    RunCode.REQUEST_TIME_LIMIT, "the model did not answer within the time limit of one call"
                ),
            )
        case Unreachable():
            return Judgement(Server.OUT, Again(0.0, attempt=False))
        case Broken(reason):
            return retry(
                Server.FAILING, CodedFailure(RunCode.MODEL_UNAVAILABLE, f"no answer from the model: {reason}")
            )
        case Reply(status=status) as reply if 200 <= status < 300:
            answer = answers.read(reply.body, endpoint)
            if fault is not None and isinstance(answer, Answer) and (why := fault(answer)):
                answer = Unusable(why)
            if isinstance(answer, Unusable):
                message = f"the model's answer could not be used: {answer.reason}"
                return retry(Server.FAILING, CodedFailure(RunCode.INVALID_MODEL_RESPONSE, message))
            return Judgement(Server.GOOD, Succeeded(reply, answer))
        case Reply(status=status) as reply if status in (429, 503):
            wait_s = min(MAX_WAIT_S, backoff_s) * (0.5 + jitter / 2)
            return Judgement(Server.REFUSING, Again(max(wait_s, reply.retry_after_s or 0.0), attempt=False))
        case Reply(status=403) as reply if key_accepted:
            return Judgement(Server.GOOD, HttpFailure(reply))
        case Reply(status=status) as reply if status in (401, 403) or no_such_route or _unknown_model(reply):
            return Judgement(Server.MISCONFIGURED, Again(0.0, attempt=False))
        case Reply(status=status) as reply if status >= 500 or status == 408 or 300 <= status < 400:
            return retry(Server.FAILING, HttpFailure(reply))
        case Reply() as reply:
            return Judgement(Server.GOOD, HttpFailure(reply))


def foreign_404(outcome: Outcome) -> bool:
    """Whether it is a 404 as a web server gives it for a path it does not have."""
    if not isinstance(outcome, Reply) or outcome.status != 404 or _unknown_model(outcome):
        return False
    return not answers.is_error(outcome.body)


_UNKNOWN_MODEL = re.compile(
    rb"model_not_found|model[^\"]{0,200}(does not exist|not found|unknown)", re.IGNORECASE
)


def _unknown_model(reply: Reply) -> bool:
    return reply.status == 404 and _UNKNOWN_MODEL.search(reply.body[:8192]) is not None
