"""Records that are more than one call: tools between the model's turns, and workflows.

Each runs in one task from its first slot to its result. The cores decide what comes next (`toolloop`,
`workflow`); here it is done. Between two calls of the model the task holds no slot: it asks for each through
the fair schedule, as a `Turn` of its job. What it holds meanwhile is the record and what was added to it, so
the number of records under way is bounded for each organization, and their bytes for all (`memory`).

What is true if the process dies:

1. in a tool loop, anywhere
      the record begins anew: executors may see a call again
2. in a workflow, before a step's record is acknowledged
      the record goes on behind the step before: the requests of this one run again
3. after it, before the callback was called, or before its answer was acted on
      the record goes on there: the callback sees the same step with the same results
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import structlog
from msgspec import UNSET, Raw

from schemas.errors import RunCode
from schemas.records import Answered, Failed, Ref, Step
from schemas.settings import Settings
from streams import metrics
from streams.core import answers, workflow
from streams.core.bodies import is_workflow
from streams.core.judge import Again, CodedFailure, End, HttpFailure, Succeeded
from streams.core.sealing import Sealer, Unsealable
from streams.core.toolconfig import ToolConfig, WorkflowConfig, decode_openrelay
from streams.core.toolloop import Done, ToolLoop
from streams.core.workflow import Completed, Ended, Malformed, Request, Run, Workflow
from streams.crashpoints import passing
from streams.dispatch.calls import BodyStore, answered, body_for, failed, new_request_id, result_of
from streams.dispatch.jobs import Job, Tries, Turn, Work
from streams.dispatch.memory import MAX_CONVERSATION_BYTES, Hold, Memory, TooLarge
from streams.dispatch.runner import Runner
from streams.pools.pool import ModelPool, Slot
from streams.tools.callback import CallbackFailed, call_back
from streams.tools.egress import Egress, Room
from streams.tools.failure import ToolFailed
from streams.tools.http import HttpExecutor
from streams.tools.mcp import McpExecutor

PER_ORGANIZATION = 1_024
"""Records of one organization that may be under way, most of them waiting for its tools."""

COPIES = 3
"""Of an assistant message, while its tools run: itself, its calls as written, and as read or sent."""

CLOSE_WITHIN_S = 10.0
"""For the end of an MCP session, waiting for a place included."""

MAX_BACKOFF_S = 60.0

_CANCELLED = "the batch was cancelled before this request was finished"

_TOO_LARGE = (
    f"the request and what its tools added to it would be over {MAX_CONVERSATION_BYTES >> 20} MiB; "
    "have the tools give shorter results"
)

log = structlog.get_logger("openrelay.dispatch")

_encode = msgspec.json.Encoder().encode


class Stopped(Exception):
    """The batch was cancelled while the record waited to try something again."""


class AnswerRoom:
    """What a record holds, for an answer that may have to wait before any of it is read."""

    def __init__(self, runner: Runner, job: Job, work: Work, hold: Hold) -> None:
        self._runner = runner
        self._job = job
        self._work = work
        self._hold = hold

    def take(self, size: int) -> bool:
        return not self._runner.must_wait(self._work) and self._hold.take(size)

    async def wait(self, size: int) -> None:
        if self._runner.must_wait(self._work):
            await self._runner.wait(self._job, self._work)
        await self._hold.wait(size)

    def give(self, size: int) -> None:
        self._hold.give(size)


class Loops:
    """For one event loop. `pump` is called when a record wants a slot."""

    def __init__(
        self, settings: Settings, runner: Runner, store: BodyStore, pump: Callable[[], None]
    ) -> None:
        self.egress = Egress(settings.egress)
        self._runner = runner
        self._store = store
        self._pump = pump
        self._under_way: dict[str, int] = {}
        self._memory = Memory()
        self._holds: dict[Work, Hold] = {}
        self.wanting: set[Job] = set()
        """Jobs with turns that wait for a slot."""
        self.configure(settings)

    def configure(self, settings: Settings) -> None:
        self._limits = settings.limits
        self._sealer = Sealer(settings.secrets)
        self.egress.configure(settings.egress)

    def full(self, organization: str) -> bool:
        """Whether no further record of this organization may begin; one always may."""
        under_way = self._under_way.get(organization, 0)
        return under_way >= PER_ORGANIZATION or (under_way > 0 and self._memory.full(organization))

    def begin(self, job: Job, work: Work) -> None:
        """A record is about to run: it counts from now on, not only when its task has its first turn."""
        organization = _organization(job)
        self._under_way[organization] = self._under_way.get(organization, 0) + 1
        self._holds[work] = self._memory.hold(organization, job.model, work.size)
        metrics.LOOPS.inc()

    def end(self, job: Job, work: Work) -> None:
        """A record that began is not under way any more."""
        organization = _organization(job)
        metrics.LOOPS.dec()
        self._holds.pop(work).end()
        self._under_way[organization] -= 1
        if not self._under_way[organization]:
            del self._under_way[organization]

    async def run(self, job: Job, work: Work, pool: ModelPool, slot: Slot) -> Answered | Failed | Again:
        """Run a record to its result. `Again` only if nothing has come of it yet."""
        try:
            match decode_openrelay(self._opened(job, work)):
                case ToolConfig() as config:
                    return await self._tools(job, work, pool, slot, config)
                case WorkflowConfig() as config:
                    slot.release()
                    return await self._workflow(job, work, pool, config)
                case None:
                    return await self._runner.call(job, work, pool, slot)
        except Stopped:
            return self.cut_off(job, work, RunCode.BATCH_CANCELLED, _CANCELLED)

    def cut_off(self, job: Job, work: Work, code: str, message: str) -> Failed:
        """The result of a record that ends here: a workflow's succeeded requests are billed all the same."""
        result, created = failed(work, code, message), job.state.created
        assert created is not None
        step = work.lane.steps.get(work.position)
        if work.flow is not None:
            billed, report = work.flow.billed, work.flow.report(created.price)
        elif step is not None:
            billed = step.billed
            report = workflow.report(step.step, step.requests, step.billed, created.price)
        elif self._is_workflow(job, work):
            billed, report = [], workflow.UNBEGUN
        else:
            return result
        return msgspec.structs.replace(result, billed=billed, openrelay=Raw(_encode(report)))

    def _is_workflow(self, job: Job, work: Work) -> bool:
        if not work.loops:
            return False
        try:
            return is_workflow(self._opened(job, work))
        except Unsealable:  # what it is nobody can say any more; it ends without a report
            return False

    def _room(self, job: Job, work: Work) -> Room:
        return AnswerRoom(self._runner, job, work, self._holds[work])

    def _opened(self, job: Job, work: Work) -> bytes:
        assert isinstance(work.request.sealed, bytes), "a record that loops says how"
        return self._sealer.open(work.request.sealed, job.batch, work.request.index)

    # ---- tools ----

    async def _tools(
        self, job: Job, work: Work, pool: ModelPool, slot: Slot, config: ToolConfig
    ) -> Answered | Failed | Again:
        executor: HttpExecutor | McpExecutor
        if config.type == "http":
            executor = HttpExecutor(self.egress, config, work.request.custom_id, self._room(job, work))
        else:
            executor = McpExecutor(self.egress, config, self._room(job, work))
        try:
            return await self._rounds(job, work, pool, slot, config, executor)
        finally:
            if isinstance(executor, McpExecutor):
                self.egress.leave(self._close(job, config, executor))

    async def _close(self, job: Job, config: ToolConfig, executor: McpExecutor) -> None:
        """Close the session of a record that has ended in whatever way; its result does not wait for it."""
        try:
            async with (
                asyncio.timeout(CLOSE_WITHIN_S),
                self.egress.place(config.url, _organization(job)),
            ):
                await executor.close()
        except TimeoutError:
            log.debug("an MCP session was not closed", reason="no place was free")

    async def _rounds(
        self,
        job: Job,
        work: Work,
        pool: ModelPool,
        slot: Slot,
        config: ToolConfig,
        executor: HttpExecutor | McpExecutor,
    ) -> Answered | Failed | Again:
        """Turn after turn."""
        loop, hold, size = ToolLoop(config.max_rounds), self._holds[work], _size(work)
        hold.limit = MAX_CONVERSATION_BYTES
        with self._runner.large(job) as sending, self._runner.large(job) as large:
            body = await self._runner.body(work, slot, sending)
            end = await self._runner.ask(job, work, work, pool, slot, body, large, loop.fault)
        del body
        if isinstance(end, Again):
            return end
        try:
            while isinstance(end, Succeeded):
                loop, action = loop.answered(end.reply.body, end.answer)
                if isinstance(action, Done):
                    return await answered(
                        work,
                        self._store,
                        end.reply,
                        action.body,
                        usage=action.usage,
                        unmetered=action.unmetered,
                    )
                del end  # the tools may take long
                hold.resize(work.size + loop.size + COPIES * len(action.message))
                async with self._outside(job, work, config.url, config.type):
                    contents = await executor.run(action)
                passing("dispatch.ran-tools", work.request.custom_id)
                loop = loop.ran(action, contents)
                del action, contents
                hold.resize(work.size + loop.size)
                if size + loop.size > MAX_CONVERSATION_BYTES:
                    raise TooLarge
                end = await self._turn(job, work, pool, loop)
            return await result_of(work, end, self._store)
        except TooLarge:
            return failed(work, RunCode.TOOL_EXECUTION_FAILED, _TOO_LARGE)
        except ToolFailed as failure:
            return failed(work, RunCode.TOOL_EXECUTION_FAILED, str(failure))

    async def _turn(self, job: Job, work: Work, pool: ModelPool, loop: ToolLoop) -> End:
        """Call the model with all that has been said, until the call has an end."""
        tries, size = Tries(), _size(work) + loop.size
        while True:
            async with (
                self._holds[work].borrowed(size),
                self._slot(job, tries, size) as slot,
            ):
                body = loop.request(await self._store.request(work.request))
                if body is None:
                    raise ToolFailed("the request has no list of messages that results could be added to")
                body = body_for(slot.endpoint, body)
                with self._runner.large(job) as large:
                    end = await self._runner.ask(job, work, tries, pool, slot, body, large, loop.fault)
                del body
            if not isinstance(end, Again):
                return end
            await self._pause(job, end.wait_s)

    # ---- workflows ----

    async def _workflow(
        self, job: Job, work: Work, pool: ModelPool, config: WorkflowConfig
    ) -> Answered | Failed:
        flow, hold = Workflow(config, pool.model), self._holds[work]
        work.flow = flow
        step = work.lane.steps.pop(work.position, None)
        if step is not None:
            await hold.wait(step.ref.length if isinstance(step.ref, Ref) else 0)
            flow.resume(step, await self._results_of(step))
        while True:
            action = await self._call_back(job, work, config, flow)
            if isinstance(action, Completed):
                return await self._completed(job, work, flow, action)
            ended = await self._step(job, work, pool, flow, action) if isinstance(action, Run) else action
            if ended is not None:
                return self.cut_off(job, work, ended.code, ended.message)
            del action
            flow.end_step()
            hold.resize(work.size + flow.size)
            await self._note(job, work, flow)

    async def _call_back(
        self, job: Job, work: Work, config: WorkflowConfig, flow: Workflow
    ) -> Run | Completed | Ended:
        """Ask what comes next; the answer, taken apart, is held until the step ends."""
        async with self._holds[work].borrowed(len(flow.results)):
            return await self._ask_callback(job, work, config, flow, flow.request(work.request.custom_id))

    async def _ask_callback(
        self, job: Job, work: Work, config: WorkflowConfig, flow: Workflow, body: bytes
    ) -> Run | Completed | Ended:
        for attempt in range(self._limits.max_attempts):
            if attempt:
                backoff_s = min(MAX_BACKOFF_S, self._limits.retry_backoff_s * 2.0 ** (attempt - 1))
                await self._pause(job, backoff_s * (0.5 + random.random() / 2))
            try:
                async with self._outside(job, work, config.url, "callback"):
                    answer = await call_back(self.egress, config, body, self._room(job, work))
                return await self.egress.take_apart(flow.answered, answer)
            except Malformed as error:
                return _callback_failed(f"the callback's answer cannot be used: {error}")
            except CallbackFailed as failure:
                last = failure
                if not failure.again:
                    break
        return _callback_failed(str(last))

    async def _step(self, job: Job, work: Work, pool: ModelPool, flow: Workflow, run: Run) -> Ended | None:
        """Run the requests of a step at once; why the record must end, None when it goes on."""
        requests = [request for request in run.requests if request.refusal is None]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._request(job, work, pool, flow, request)) for request in requests]
        return next((ended for task in tasks if (ended := task.result()) is not None), None)

    async def _request(
        self, job: Job, work: Work, pool: ModelPool, flow: Workflow, request: Request
    ) -> Ended | None:
        tries, hold = Tries(), self._holds[work]
        started = False
        while True:
            await hold.wait(0)  # until there is room for an answer
            async with self._slot(job, tries, len(request.body)) as slot:
                if not started and not flow.may_start():
                    return flow.too_large or flow.out_of_tokens
                started = True
                body = body_for(slot.endpoint, request.body)
                with self._runner.large(job) as large:
                    end = await self._runner.ask(job, work, tries, pool, slot, body, large)
            if not isinstance(end, Again):
                break
            try:
                await self._pause(job, end.wait_s)
            except Stopped:
                return Ended(RunCode.BATCH_CANCELLED, _CANCELLED)
        before = flow.size
        match end:
            case Succeeded(reply, answer):
                body = answers.compact(reply.body)
                flow.succeeded(request, reply.status, body, answer.usage, answer.unmetered)
            case HttpFailure(reply):
                flow.refused(request, reply.status, answers.error_body(reply.body))
            case CodedFailure(code, message):
                flow.failed(request, code, message)
        hold.resize(hold.size + flow.size - before)
        return flow.too_large

    async def _note(self, job: Job, work: Work, flow: Workflow) -> None:
        """Write the finished step down, before its results are shown to anybody."""
        request = work.request
        step = Step(
            batch=request.batch,
            index=request.index,
            custom_id=request.custom_id,
            origin=work.origin,
            step=flow.step,
            requests=flow.requests,
            billed=list(flow.billed),
            unbilled=list(flow.unbilled),
            **await self._store.answer(request.batch, request.index, flow.results),
        )
        await self._runner.note(job, work, step)

    async def _results_of(self, step: Step) -> bytes:
        if isinstance(step.ref, Ref):
            return await self._store.read(step.ref)
        assert step.body is not UNSET, "a step has its results or says where they are"
        return bytes(step.body)

    async def _completed(self, job: Job, work: Work, flow: Workflow, action: Completed) -> Answered:
        request, created = work.request, job.state.created
        assert created is not None
        return Answered(
            batch=request.batch,
            index=request.index,
            custom_id=request.custom_id,
            origin=work.origin,
            status_code=200,
            request_id=new_request_id(),
            billed=flow.billed,
            **await self._store.answer(
                request.batch,
                request.index,
                answers.compact(flow.output(action.output, created.price)),
            ),
        )

    # ---- waiting ----

    @asynccontextmanager
    async def _outside(self, job: Job, work: Work, url: str, kind: str) -> AsyncIterator[None]:
        """A place for a request to what a customer runs, counted and timed.

        Those that hold the places may wait for the memory that the eldest will leave.
        """
        async with self.egress.place(url, _organization(job), self._holds[work].eldest):
            started = asyncio.get_running_loop().time()
            outcome = "failed"
            try:
                yield
                outcome = "answered"
            finally:
                metrics.TOOL_REQUESTS.labels(kind, outcome).inc()
                metrics.TOOL_SECONDS.labels(kind).observe(asyncio.get_running_loop().time() - started)

    @asynccontextmanager
    async def _slot(self, job: Job, tries: Tries, size: int) -> AsyncIterator[Slot]:
        """A slot for one call of a running record, when the schedule gives it one."""
        turn = Turn(tries.avoid, size)
        job.turns.append(turn)
        self.wanting.add(job)
        self._pump()
        try:
            slot = await turn.slot
        except asyncio.CancelledError:
            if turn.slot.done() and not turn.slot.cancelled():
                turn.slot.result().release()
            raise
        try:
            yield slot
        finally:
            slot.release()

    async def _pause(self, job: Job, seconds: float) -> None:
        """Wait before trying again. Raises Stopped when the batch is cancelled meanwhile, or was before."""
        try:
            async with asyncio.timeout(seconds):
                await job.stopped.wait()
        except TimeoutError:
            return
        raise Stopped


def _size(work: Work) -> int:
    """Bytes of a record's request, wherever it lies."""
    return work.request.ref.length if isinstance(work.request.ref, Ref) else work.size


def _callback_failed(message: str) -> Ended:
    return Ended(RunCode.WORKFLOW_CALLBACK_FAILED, message)


def _organization(job: Job) -> str:
    assert job.state.created is not None
    return job.state.created.organization
