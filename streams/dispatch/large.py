"""Room for large bodies until they are sent, and for large answers until they are on their way.

Every call may hold a body and an answer of `INLINE_BODY_BYTES`; what is larger waits here for room, an answer
while the rest of it is still with the server. The eldest of each model always has room (see `memory`), so
that there is always one that ends.
"""

from __future__ import annotations

from types import TracebackType

from streams.dispatch.memory import Hold, Memory

COPIES = 2
"""Of large bytes at once: in the parts they came in and joined, as a line and as the body in it."""


class Large:
    """What one call holds, as a context that gives it back. Costs nothing for as long as that is nothing."""

    def __init__(self, memory: Memory, organization: str, model: str) -> None:
        self._memory = memory
        self._organization = organization
        self._model = model
        self._hold: Hold | None = None

    async def wait(self, size: int) -> None:
        """Hold so many bytes more, as soon as there is room."""
        if self._hold is None:
            self._hold = self._memory.hold(self._organization, self._model, 0)
        await self._hold.wait(COPIES * size)

    def give(self) -> None:
        """Hold nothing any more."""
        if self._hold is not None:
            self._hold.end()
            self._hold = None

    def __enter__(self) -> Large:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give()
