"""A process that checks inputs, whose parent dies within a job."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from schemas.settings import Storage
from services.api import checker
from services.api.checking import Open


def test_an_answer_nobody_waits_for(tmp_path: Path) -> None:
    """The end of the channel is seen in sending, before it is seen in listening: no trace of it is left."""
    ours, theirs = socket.socketpair()
    body = tmp_path / "body"
    body.write_bytes(b'{"a":1}')
    with ours, theirs, body.open("rb") as file:
        ours.shutdown(socket.SHUT_RD)
        checker.send(
            ours, checker.encode(checker.Job(Storage(url=tmp_path.as_uri()), Open(1))), [file.fileno()]
        )
        done = subprocess.run(
            [sys.executable, "-m", "services.api.checker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
            stderr=subprocess.PIPE,
            timeout=30,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, b"")
