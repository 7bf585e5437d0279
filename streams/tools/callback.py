"""One call of a workflow's callback."""

from __future__ import annotations

from streams.core.toolconfig import WorkflowConfig
from streams.tools.egress import AnswerRefused, Egress, EgressFailed, Room
from streams.tools.failure import headers


class CallbackFailed(Exception):
    """No usable answer came. `again` says whether the same call may be made once more."""

    def __init__(self, message: str, *, again: bool) -> None:
        super().__init__(message)
        self.again = again


async def call_back(egress: Egress, config: WorkflowConfig, body: bytes, room: Room | None = None) -> bytes:
    """The body of the callback's 2xx answer, read into `room`. Raises CallbackFailed."""
    try:
        status, answer = await egress.post(
            config.url, body, headers=headers(config), timeout_s=config.timeout_ms / 1000, room=room
        )
    except AnswerRefused as refused:
        raise CallbackFailed(f"the callback's answer cannot be used: {refused}", again=False) from None
    except EgressFailed as failure:
        raise CallbackFailed(f"the callback could not be used: {failure}", again=True) from None
    if not 200 <= status < 300:
        raise CallbackFailed(f"the callback answered with status {status}", again=status >= 500)
    return answer
