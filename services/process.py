"""What every process of a stack has in common: its log, its word that it serves, its end with its parent.

A supervisor starts a role with `spawn` and hears from it through a pipe: the role calls `signal_ready` once
it serves. The socket a role serves on may be its supervisor's: then nobody is refused while the role is
started again, and two processes of it may serve side by side. A child dies with its parent, whatever kills
the parent: the kernel sends SIGKILL when the thread that spawned it ends (so spawn from the main thread
only), and a child that was forked too late to be told checks for itself that its parent is still there.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

READY_FD = "OPENRELAY_READY_FD"
"""Names the pipe on which a supervised role says that it serves."""

LISTEN_FD = "OPENRELAY_LISTEN_FD"
"""Names the socket on which a supervised role serves, bound and listening already."""

_PR_SET_PDEATHSIG = 1
_prctl: Callable[..., int] | None = None
if sys.platform == "linux":
    _prctl = ctypes.CDLL(None, use_errno=True).prctl


def signal_ready() -> None:
    """Tell the supervisor that this process serves; without a supervisor, nothing happens.

    May be called again (after a reload): only the first call says anything.
    """
    name = os.environ.pop(READY_FD, None)
    if name is None:
        return
    handle = int(name)
    try:
        os.write(handle, b"ready\n")
    finally:
        os.close(handle)


class CannotStart(Exception):
    """The operator has to put something right first; the message says what in one line."""


class PortTaken(CannotStart):
    """Another program listens there; the message names the port."""


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket; raises PortTaken.

    Its protocol is named, since asyncio switches Nagle's delay off only on sockets that say they are TCP.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise PortTaken(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return listener


def allow_open_files() -> None:
    """As many as this process may have: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def inherited_listener() -> socket.socket | None:
    """The socket this process was started with to serve on; None: it has to listen by itself.

    Connections wait in it while nobody accepts, so it is served on once answers can be given.
    """
    name = os.environ.pop(LISTEN_FD, None)
    if name is None:
        return None
    listener = socket.socket(fileno=int(name))
    listener.set_inheritable(False)
    return listener


def spawn(
    command: Sequence[str],
    *,
    log: Path,
    environ: Mapping[str, str],
    ready: bool = True,
    cwd: Path | None = None,
    listener: socket.socket | None = None,
) -> tuple[subprocess.Popen[bytes], int | None]:
    """Start a child that dies with this process; its output is appended to `log`.

    A SIGHUP waits until the child says `allow_hangup`. Returns the process and, with `ready`, the reading
    end of its ready pipe (non-blocking): one line when it serves, end of file when it died before. Call it
    from the main thread.
    """
    reading: int | None = None
    inherited: list[int] = []
    variables = dict(environ)
    variables.pop(READY_FD, None)
    variables.pop(LISTEN_FD, None)
    if ready:
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        inherited.append(writing)
        variables[READY_FD] = str(writing)
    if listener is not None:
        variables[LISTEN_FD] = str(listener.fileno())
    try:
        with log.open("ab") as output:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=variables,
                cwd=cwd,
                pass_fds=inherited if listener is None else [*inherited, listener.fileno()],
                start_new_session=True,  # an interrupt at the terminal reaches the supervisor alone
                preexec_fn=_before_program(os.getpid()),
            )
    except BaseException:
        if reading is not None:
            os.close(reading)
        raise
    finally:
        for handle in inherited:
            os.close(handle)
    return child, reading


def _before_program(parent: int) -> Callable[[], None]:
    dies = dies_with(parent)

    def between_fork_and_exec() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        dies()

    return between_fork_and_exec


def allow_hangup() -> None:
    """There is a handler for SIGHUP now: let one come that was sent while there was none."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


def dies_with(parent: int) -> Callable[[], None]:
    """What a child does before its program, so as to die with this process; see the module."""

    def between_fork_and_exec() -> None:
        if _prctl is not None:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the kernel knew what to do then
            os._exit(1)

    return between_fork_and_exec


_without_locals = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)


def configure_log(role: str) -> None:
    """One JSON object a line on standard error, from structlog and from the standard library alike."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.ExceptionRenderer(_without_locals),  # they may hold what is secret
            structlog.processors.JSONRenderer(),
        ],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for noisy in ("httpx", "httpcore", "faust", "aiokafka", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(role=role, pid=os.getpid())
