"""The HTTP side of `orl`: one synchronous client, whose every failure is one sentence.

Requests that may be repeated are, with growing pauses, while the server cannot be reached or asks for
patience (429, 502, 503, 504). A server that has answered once is waited for longer than one that never did; a
stack on this machine that was killed is not waited for at all.
A create carries an idempotency key and so may be repeated; an upload repeated after a lost answer leaves a
file nobody refers to, which expires; a delete or a cancel is repeated only if it was never sent.
"""

from __future__ import annotations

import ipaddress
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import quote

import httpx

AGAIN_LATER = frozenset({429, 502, 503, 504})
MAX_PAUSE_S = 20.0
PATIENCE_S = 10.0
"""How long to try a server that has not answered yet."""
LONG_PATIENCE_S = 120.0
"""How long to sit out the silence of one that has: a restart takes less."""
_CONNECT_S = 10.0
_ANSWER_S = 300.0
"""Checking 50,000 records before the answer to a create takes a while."""


class Exit(IntEnum):
    """Exit statuses of `orl`."""

    OK = 0
    FAILED_RECORDS = 1
    USAGE = 2
    AUTHENTICATION = 3
    STOPPED = 4
    """The batch expired or was cancelled."""
    NETWORK = 5


class Trouble(Exception):
    """The command cannot go on; the message is one sentence for the user."""

    def __init__(self, message: str, exit_status: Exit) -> None:
        super().__init__(message)
        self.exit_status = exit_status


class Refused(Trouble):
    """The server answered with an error."""

    def __init__(self, status: int, code: str | None, message: str, request_id: str | None) -> None:
        marks = [mark for mark in (code, request_id and f"request {request_id}") if mark]
        described = f"{message} [{', '.join(marks)}]" if marks else message
        super().__init__(described, _exit_status(status))
        self.status = status
        self.code = code


class Unreachable(Trouble):
    """No answer, or only answers that ask for patience, for longer than the client has any."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Exit.NETWORK)


def _exit_status(status: int) -> Exit:
    if status in (401, 403):
        return Exit.AUTHENTICATION
    return Exit.NETWORK if status >= 500 or status == 429 else Exit.USAGE


class Client:
    """Talks to one host with one key. `say` gets a sentence when a request has to wait and try again;
    `killed` is asked when there is no connection, and has a sentence when waiting for one is in vain."""

    def __init__(
        self,
        base_url: str,
        api_key: str,
        *,
        say: Callable[[str], None] = lambda sentence: None,
        sleep: Callable[[float], None] = time.sleep,
        killed: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.base_url = base_url
        self.answered = False
        """Whether any request has succeeded."""
        self._say = say
        self._sleep = sleep
        self._killed = killed
        self._http = httpx.Client(
            headers={
                "Authorization": f"Bearer {api_key}",
                "User-Agent": "orl",
                "Accept-Encoding": "identity",
            },
            timeout=httpx.Timeout(_ANSWER_S, connect=_CONNECT_S),
            trust_env=not _is_loopback(base_url),
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.close()

    def get(self, path: str, **query: object) -> dict[str, Any]:
        """GET a JSON object; parameters that are None are left out."""
        params = {name: str(value) for name, value in query.items() if value is not None}
        return _object(self._send("GET", path, repeatable=True, params=params))

    def delete(self, path: str) -> dict[str, Any]:
        return _object(self._send("DELETE", path, repeatable=False))

    def post(self, path: str, body: object, *, idempotency_key: str | None = None) -> dict[str, Any]:
        """POST JSON. Only with an idempotency key is a request whose answer was lost sent again."""
        headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
        repeatable = idempotency_key is not None
        return _object(self._send("POST", path, repeatable=repeatable, json=body, headers=headers))

    def upload(self, file: Path, sent: Callable[[int], None]) -> dict[str, Any]:
        """POST a file of requests, read as it is sent; `sent` hears how many bytes were, from 0 again if
        the upload has to start over."""
        with file.open("rb") as opened:
            body = cast(IO[bytes], _Counted(opened, sent))
            return _object(
                self._send(
                    "POST",
                    "/files",
                    repeatable=True,
                    data={"purpose": "batch"},
                    files={"file": (file.name, body, "application/jsonl")},
                )
            )

    def download(
        self, file_id: str, write: Callable[[bytes], object], progress: Callable[[int, int], None]
    ) -> int:
        """Hand the file's content to `write`, piece by piece, each byte once; returns its size.

        A broken download goes on where it broke: a published file never changes. `progress` hears how many
        bytes have come and how many there are.
        """
        done = 0
        etag = ""
        patience = _Patience(self)
        while True:
            headers = {"Range": f"bytes={done}-", "If-Range": etag} if done and etag else {}
            try:
                with self._stream(route("files", file_id, "content"), headers) as answer:
                    whole = answer.status_code == 200
                    skip = done if whole else 0
                    total = int(answer.headers.get("content-length", 0)) + (0 if whole else done)
                    self.answered = True
                    etag = answer.headers.get("etag", "")
                    for piece in answer.iter_raw(64 * 1024):
                        fresh = piece[skip:]
                        skip = max(0, skip - len(piece))
                        write(fresh)
                        done += len(fresh)
                        progress(done, total)
                        patience.renew()
                return done
            except (httpx.TransportError, _Later) as fault:
                patience.wait(fault)

    @contextmanager
    def _stream(self, path: str, headers: Mapping[str, str]) -> Iterator[httpx.Response]:
        with self._http.stream("GET", self.base_url + path, headers=headers) as answer:
            if answer.status_code not in (200, 206):
                answer.read()
                _check(answer)
            yield answer

    def _send(self, method: str, path: str, *, repeatable: bool, **options: Any) -> httpx.Response:
        patience = _Patience(self)
        while True:
            try:
                answer = self._http.request(method, self.base_url + path, **options)
                _check(answer)
                self.answered = True
                return answer
            except _Later as fault:
                patience.wait(fault)
            except httpx.TransportError as fault:
                if not repeatable and not isinstance(fault, httpx.ConnectError | httpx.ConnectTimeout):
                    raise Unreachable(f"{self.base_url} did not answer: {_sentence(fault)}.") from fault
                patience.wait(fault)


def route(*parts: str) -> str:
    """A path below the base URL; whatever characters an id is given with stay inside its part."""
    return "".join(f"/{quote(part, safe='')}" for part in parts)


class _Later(Exception):
    """The server asks for patience."""

    def __init__(self, refused: Refused, retry_after_s: float | None) -> None:
        super().__init__(str(refused))
        self.refused = refused
        self.retry_after_s = retry_after_s


class _Patience:
    """Pauses between attempts of one request, and the moment to give up."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.renew()

    def renew(self) -> None:
        """The server did something: start counting again."""
        self._left_s = LONG_PATIENCE_S if self._client.answered else PATIENCE_S
        self._pause_s = 0.25

    def wait(self, fault: httpx.TransportError | _Later) -> None:
        """Pause before the next attempt. Raises the fault as `Trouble` when there is no patience left."""
        later = fault if isinstance(fault, _Later) else None
        if later is None and (said := self._client._killed()) is not None:
            raise Unreachable(said) from fault
        if self._left_s <= 0:
            if later is not None:
                raise later.refused from fault
            hint = ""
            if isinstance(fault, httpx.ConnectError) and _is_loopback(self._client.base_url):
                hint = " No stack seems to run there; `openrelay up` starts one."
            raise Unreachable(
                f"{self._client.base_url} cannot be reached: {_sentence(fault)}.{hint}"
            ) from fault
        asked_s = later.retry_after_s if later is not None else None
        pause_s = self._pause_s * random.uniform(0.8, 1.0) if asked_s is None else asked_s
        pause_s = min(pause_s, self._left_s, 60.0)
        self._client._say(f"{_sentence(fault)}; trying again in {pause_s:.1f} s")
        self._client._sleep(pause_s)
        self._left_s -= max(pause_s, 0.05)
        self._pause_s = min(self._pause_s * 2, MAX_PAUSE_S)


class _Counted:
    """A file that says how far it has been read."""

    def __init__(self, file: IO[bytes], sent: Callable[[int], None]) -> None:
        self._file = file
        self._sent = sent

    def read(self, size: int = -1) -> bytes:
        piece = self._file.read(size)
        self._sent(self._file.tell())
        return piece

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def fileno(self) -> int:
        return self._file.fileno()


def _check(answer: httpx.Response) -> None:
    """Raise `Refused` for an error, `_Later` for one that may pass."""
    if answer.is_success:
        return
    code, message = None, f"The server answered HTTP {answer.status_code}"
    try:
        error = answer.json()["error"]
        code, message = error.get("code"), str(error["message"]).rstrip(".")
    except (ValueError, KeyError, TypeError, AttributeError):
        pass  # not one of our errors, a proxy's perhaps: the status says all there is
    refused = Refused(answer.status_code, code, f"{message}.", answer.headers.get("x-request-id"))
    if answer.status_code in AGAIN_LATER:
        raise _Later(refused, _retry_after_s(answer))
    raise refused


def _retry_after_s(answer: httpx.Response) -> float | None:
    value = answer.headers.get("retry-after", "")
    return float(value) if value.isascii() and value.isdigit() else None


def _object(answer: httpx.Response) -> dict[str, Any]:
    try:
        value = answer.json()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise Trouble(
            f"{answer.url} did not answer with a JSON object: is it an OpenRelay server?", Exit.NETWORK
        )
    return value


def _sentence(fault: Exception) -> str:
    if said := str(fault).rstrip("."):
        return said
    return "no answer in time" if isinstance(fault, httpx.TimeoutException) else "the connection broke"


def _is_loopback(url: str) -> bool:
    """Whether requests to `url` stay on this machine, where no proxy can help."""
    host = httpx.URL(url).host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
