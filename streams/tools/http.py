"""The `http` executor: one POST carries all tool calls of a turn, one answer all their results."""

from __future__ import annotations

from functools import partial

import msgspec

from schemas.tools import ExecuteAnswer, ExecuteRequest
from streams.core.strictjson import NotJson, parse
from streams.core.toolconfig import ToolConfig
from streams.core.toolloop import RunTools
from streams.tools.egress import Egress, EgressFailed, Room
from streams.tools.failure import ToolFailed, headers

_encode = msgspec.json.Encoder().encode
_NONE = msgspec.Raw(b"null")


class HttpExecutor:
    """Answers are read into `room`, and what they took of it is left to whoever gave it."""

    def __init__(self, egress: Egress, config: ToolConfig, custom_id: str, room: Room | None = None) -> None:
        self._egress = egress
        self._room = room
        self._config = config
        self._custom_id = custom_id

    async def run(self, turn: RunTools) -> list[str]:
        """The calls' contents, in their order. Sent once. Raises ToolFailed."""
        config = self._config
        context = _NONE if config.context is None else msgspec.Raw(config.context)
        body = _encode(ExecuteRequest(self._custom_id, context, msgspec.Raw(turn.written)))
        try:
            status, answer = await self._egress.post(
                config.url, body, headers=headers(config), timeout_s=config.timeout_ms / 1000, room=self._room
            )
        except EgressFailed as failure:
            raise ToolFailed(f"the tool executor could not be used: {failure}") from None
        if not 200 <= status < 300:
            raise ToolFailed(f"the tool executor answered with status {status}")
        return await self._egress.take_apart(partial(_contents, turn), answer)

    async def close(self) -> None:
        """Nothing is kept open."""


def _contents(turn: RunTools, answer: bytes) -> list[str]:
    try:
        results = msgspec.convert(parse(answer), ExecuteAnswer).results
    except NotJson as error:
        raise ToolFailed(f"the tool executor's answer {error.unquoted}") from None
    except msgspec.ValidationError:
        raise ToolFailed(
            'the tool executor\'s answer is not {"results": [{"tool_call_id", "content"}]} with text contents'
        ) from None
    contents = {result.tool_call_id: result.content for result in results}
    if len(contents) != len(results):
        raise ToolFailed("the tool executor answered a call twice")
    wanted = [call.id for call in turn.calls]
    if contents.keys() != set(wanted):
        raise ToolFailed("the tool executor did not answer exactly the calls it was given")
    return [contents[each] for each in wanted]
