"""Which stack an operator's command is about."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from services.operator.place import settings_of
from services.process import CannotStart
from services.settings import write
from tests.support.settings import settings_for


def running(directory: Path, port: int) -> Path:
    """What `openrelay up` leaves in its directory while it runs."""
    settings = directory / "run" / "settings.json"
    write(settings_for(directory, bootstrap=f"127.0.0.1:{port}"), settings)
    (directory / "connection.json").write_text(json.dumps({"pids": {"api": os.getpid(), "kafka": 0}}))
    return settings


def test_the_running_stack_when_nothing_is_named(tmp_path: Path) -> None:
    running(tmp_path, 9001)
    assert settings_of(None, {}, tmp_path).kafka.bootstrap == "127.0.0.1:9001"


def test_a_stack_that_has_ended_is_none(tmp_path: Path) -> None:
    running(tmp_path, 9001)
    (tmp_path / "connection.json").unlink()
    with pytest.raises(CannotStart, match="name its settings with --config"):
        settings_of(None, {}, tmp_path)


def test_a_stack_that_was_killed_is_none(tmp_path: Path) -> None:
    running(tmp_path, 9001)
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        # It stays a zombie until it is waited for, as in a container whose first process waits for nobody.
        os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
        (tmp_path / "connection.json").write_text(json.dumps({"pids": {"api": dead.pid, "kafka": 0}}))
        with pytest.raises(CannotStart, match=r"any more, it was killed.* `openrelay up --data "):
            settings_of(None, {}, tmp_path)


def test_variables_have_had_their_say_in_a_running_stack(tmp_path: Path) -> None:
    settings = running(tmp_path, 9001)
    variables = {"OPENRELAY_LIMITS__MAX_ATTEMPTS": "1"}
    assert settings_of(settings, variables, tmp_path).limits.max_attempts == 5
    assert settings_of(None, variables, tmp_path).limits.max_attempts == 5


def test_a_named_file_wins_and_variables_override_it(tmp_path: Path) -> None:
    running(tmp_path, 9001)
    other = tmp_path / "other.json"
    other.write_bytes(msgspec.json.encode(settings_for(tmp_path, bootstrap="127.0.0.1:9002")))
    found = settings_of(other, {"OPENRELAY_LIMITS__MAX_ATTEMPTS": "1"}, tmp_path)
    assert (found.kafka.bootstrap, found.limits.max_attempts) == ("127.0.0.1:9002", 1)


def test_an_environment_that_names_a_broker_is_a_cluster(tmp_path: Path) -> None:
    running(tmp_path, 9001)
    tree = json.loads(msgspec.json.encode(settings_for(tmp_path, bootstrap="127.0.0.1:9003")))
    environ = {
        f"OPENRELAY_{table.upper()}": json.dumps(tree[table])
        for table in ("clickhouse", "storage", "secrets", "organizations", "models")
    }
    environ["OPENRELAY_KAFKA__BOOTSTRAP"] = "127.0.0.1:9003"
    assert settings_of(None, environ, tmp_path).kafka.bootstrap == "127.0.0.1:9003"


def test_faulty_settings_are_told(tmp_path: Path) -> None:
    faulty = tmp_path / "faulty.toml"
    faulty.write_text("[kafka]\nbootstrap = 'x'\n")
    with pytest.raises(CannotStart, match="clickhouse: missing"):
        settings_of(faulty, {}, tmp_path)


def test_the_environment_says_where_the_stack_keeps_its_data(tmp_path: Path) -> None:
    elsewhere = {"OPENRELAY_DATA_DIR": str(tmp_path)}
    with pytest.raises(CannotStart, match=f"no stack runs in {tmp_path}"):
        settings_of(None, elsewhere)
    running(tmp_path, 9001)
    assert settings_of(None, elsewhere).kafka.bootstrap == "127.0.0.1:9001"
