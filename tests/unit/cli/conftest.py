"""`orl` in this process or its own, against a stand-in for the server."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest

from services.cli import outcome
from services.cli.orl import main
from tests.unit.cli.standin import KEY, StandIn, standing_in


class Done(NamedTuple):
    """What a run of `orl` left: exit status and what it printed."""

    status: int
    out: str
    err: str


class Orl(Protocol):
    def __call__(self, *words: str, stdin: str = "") -> Done: ...


@pytest.fixture
def server() -> Iterator[StandIn]:
    with standing_in() as running:
        yield running


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's home without credentials, and nothing in the environment."""
    for name in list(os.environ):
        if name.startswith("OPENRELAY_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("CONFIG", "STATE", "DATA"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def logged_in(home: Path, server: StandIn, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPENRELAY_API_KEY", KEY)
    monkeypatch.setenv("OPENRELAY_BASE_URL", server.base_url)
    return home


@pytest.fixture
def orl(home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Orl:
    monkeypatch.setattr(outcome, "SHORTEST_POLL_S", 0.01)

    def run(*words: str, stdin: str = "") -> Done:
        monkeypatch.setattr(sys, "argv", ["orl", *words])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        printed = capfd.readouterr()
        assert "Traceback" not in printed.err
        code = end.value.code
        return Done(0 if code is None else int(code), printed.out, printed.err)

    return run
