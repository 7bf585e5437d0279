"""The simulated model: slots, latency, behaviours, and the numbers that tests ask for.

A call takes a slot or waits for one in order of arrival, as in a real server; it holds the slot for the
latency plus what its behaviour adds. A client that goes away frees its slot at once. Everything happens in
callbacks of one event loop, so a call without latency is answered before `submit` returns.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, deque
from collections.abc import Callable

import msgspec

from schemas.settings import Strict
from services.simulator.answers import Delivery, Reply, answer, unknown_model
from services.simulator.behaviours import Behaviour, parse
from services.simulator.calls import FLUSH_S, CallLine, Calls
from services.simulator.prompts import Prompt


class Options(Strict, frozen=True, kw_only=True):
    """How the server behaves; every field can be changed while it runs, by POST /control."""

    latency_ms: float = 0.0
    """Median time a call holds its slot."""
    latency_sigma: float = 0.0
    """Spread of the log-normal latency; 0 makes it constant."""
    concurrency: int = 256
    """Slots; calls beyond that wait."""
    healthy: bool = True
    """False: /health answers 503."""
    probes: bool = True
    """False: /health and /metrics are 404, as on servers that have neither."""
    behaviour: str | None = None
    """Words that take the place of those in every prompt, e.g. `status:503`."""
    log_bodies: bool = False
    """Whether the call log keeps the requests."""

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError("concurrency must be at least 1")
        if self.latency_ms < 0 or self.latency_sigma < 0:
            raise ValueError("latency_ms and latency_sigma must not be negative")


class Stats(msgspec.Struct, frozen=True):
    """GET /stats. Peaks: the most calls that had a slot at once, and the most that had one or waited."""

    calls: int
    running: int
    waiting: int
    peak_running: int
    peak_open: int
    aborted: int
    """Calls whose client went away before the answer."""
    options: Options


class Call:
    """One request on its way through the model."""

    __slots__ = (
        "arrived_s",
        "behaviour",
        "body",
        "concurrency",
        "done",
        "number",
        "peer",
        "prompt",
        "reply",
        "started_s",
        "timer",
    )

    def __init__(
        self, prompt: Prompt, behaviour: Behaviour, reply: Callable[[Reply], None], peer: str, body: bytes
    ) -> None:
        self.prompt = prompt
        self.behaviour = behaviour
        self.reply = reply
        self.peer = peer
        self.body = body
        self.number = 0
        self.arrived_s = time.time()
        self.started_s: float | None = None
        self.concurrency = 0
        self.timer: asyncio.TimerHandle | None = None
        self.done = False


class SimulatedModel:
    """One server's model. `models` are the names it serves; with none it serves every name."""

    def __init__(self, models: list[str], options: Options, calls: Calls, seed: int) -> None:
        self.models = models
        self.options = options
        self.calls = calls
        self._random = random.Random(seed)
        self._repeats: Counter[str] = Counter()
        self._waiting: deque[Call] = deque()
        self._waiting_count = 0
        self._starting = False
        self.running = 0
        self.aborted = 0
        self.peak_running = 0
        self.peak_open = 0

    def submit(self, prompt: Prompt, reply: Callable[[Reply], None], peer: str, body: bytes) -> Call:
        """Take a call; `reply` is called once with its answer, unless `abandon` comes first."""
        override = self.options.behaviour
        behaviour = parse(prompt.text if override is None else override, prompt.rounds)
        if behaviour.times is not None:
            self._repeats[key := prompt.digest()] += 1
            if self._repeats[key] > behaviour.times:
                behaviour = behaviour.without_fault()
        call = Call(prompt, behaviour, reply, peer, body)
        call.number = self.calls.arrived(prompt.marker)
        if self.models and prompt.model not in self.models:
            self._end(call, unknown_model(prompt.model))
            return call
        self._waiting.append(call)
        self._waiting_count += 1
        self.peak_open = max(self.peak_open, self.running + self._waiting_count)
        self._start_waiting()
        return call

    def abandon(self, call: Call) -> None:
        """The client went away."""
        if call.done:
            return
        self.aborted += 1
        if call.started_s is None:
            self._waiting_count -= 1
        else:
            self.running -= 1
        self._end(call, None)
        self._start_waiting()

    def configure(self, options: Options) -> None:
        self.options = options
        self._start_waiting()

    def reset(self) -> None:
        """Forget counts and peaks, not the calls that are open."""
        self.calls.reset()
        self._repeats.clear()
        self.aborted = 0
        self.peak_running = self.running
        self.peak_open = self.running + self._waiting_count

    def stats(self) -> Stats:
        return Stats(
            self.calls.count,
            self.running,
            self._waiting_count,
            self.peak_running,
            self.peak_open,
            self.aborted,
            self.options,
        )

    def _start_waiting(self) -> None:
        # An answer given at once makes its client's next call start here again: the flag keeps a long
        # queue from becoming a deep recursion.
        if self._starting:
            return
        self._starting = True
        try:
            while self._waiting and self.running < self.options.concurrency:
                call = self._waiting.popleft()
                if not call.done:
                    self._waiting_count -= 1
                    self._start(call)
        finally:
            self._starting = False

    def _start(self, call: Call) -> None:
        self.running += 1
        self.peak_running = max(self.peak_running, self.running)
        call.concurrency = self.running
        call.started_s = time.time()
        if call.behaviour.fault == "hang":
            return
        hold_s = self._latency_s() + call.behaviour.slow_s
        if hold_s > 0:
            call.timer = asyncio.get_running_loop().call_later(hold_s, self._finish, call)
        else:
            self._finish(call)

    def _latency_s(self) -> float:
        median_s = self.options.latency_ms / 1000
        if median_s and self.options.latency_sigma:
            return median_s * self._random.lognormvariate(0, self.options.latency_sigma)
        return median_s

    def _finish(self, call: Call) -> None:
        self.running -= 1
        self._end(call, answer(call.prompt, call.behaviour, call.number, time.time()))
        self._start_waiting()

    def _end(self, call: Call, reply: Reply | None) -> None:
        call.done = True
        if call.timer is not None:
            call.timer.cancel()
        if self.calls.logged:
            self._log(call, reply)
        if reply is not None:
            call.reply(reply)

    def _log(self, call: Call, reply: Reply | None) -> None:
        silent = reply is None or reply.delivery in (Delivery.DROP, Delivery.RESET)
        line = CallLine(
            call.number,
            call.arrived_s,
            call.started_s,
            time.time(),
            None if silent or reply is None else reply.status,
            call.prompt.model,
            call.prompt.marker,
            call.prompt.digest(),
            call.prompt.rounds,
            call.concurrency,
            call.peer,
            msgspec.Raw(call.body) if self.options.log_bodies else None,
        )
        if self.calls.ended(line):
            asyncio.get_running_loop().call_later(FLUSH_S, self.calls.flush)
