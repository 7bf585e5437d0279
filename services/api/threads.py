"""Where blocking work runs: storage calls in threads of their own.

They are apart from the loop's default threads, which ask the broker for offsets: a slow disk must not hold
up every read of the API.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

STORAGE_THREADS = 24

P = ParamSpec("P")
T = TypeVar("T")


class StorageThreads:
    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(STORAGE_THREADS, thread_name_prefix="storage")

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking call in a thread. A cancelled caller does not stop the call."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: call(*args, **kwargs))

    async def chunks(self, stream: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
        """What a blob's stream gives, each chunk read in a thread when it is asked for."""
        reading: asyncio.Future[bytes] | None = None
        try:
            while True:
                reading = asyncio.ensure_future(self.run(next, stream, b""))
                chunk = await asyncio.shield(reading)
                if not chunk:
                    return
                yield chunk
        finally:
            # A caller that leaves does not stop the thread that is reading; the file is closed after it.
            if reading is None or reading.done():
                _close(stream)
            else:
                reading.add_done_callback(lambda _: _close(stream))

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)


def _close(stream: Iterator[bytes]) -> None:
    if isinstance(stream, Generator):
        stream.close()
