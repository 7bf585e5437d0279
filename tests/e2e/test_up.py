"""`openrelay up`: the fixed interface that scripts outside the project rely on."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import stat
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import clickhouse_connect
import httpx
import psutil
import pytest

from tests.support.command import environment, openrelay
from tests.support.stack import Stack

ROLES = {"api", "dispatch", "settle", "sink", "meter", "control", "warehouse", "kafka"}

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack with no settings at all."""
    with Stack(tmp_path_factory.mktemp("stack")) as running:
        yield running


@pytest.fixture(scope="module")
def configured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack with settings of a file and of a variable, in a folder with folders called as our packages."""
    directory = tmp_path_factory.mktemp("configured")
    for name in ("services", "streams", "schemas"):
        (directory / name).mkdir()
        (directory / name / "__init__.py").write_text("raise SystemExit('the wrong folder was imported')")
    running = Stack(directory, _config(), "--dispatchers", "2")
    try:
        _start(running)
        yield running
    finally:
        running.close()


def _start(configured: Stack) -> None:
    began = time.monotonic()
    with contextlib.chdir(configured.directory):
        configured.start(OPENRELAY_LIMITS__RETRY_BACKOFF_S="0.3")
    assert time.monotonic() - began < 60


def _get(url: str, key: str | None = None) -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def _serves(url: str) -> bool:
    try:
        return _get(url) < 500
    except OSError:
        return False


def test_what_it_says(stack: Stack) -> None:
    ready = [line for line in stack.said.splitlines() if line.startswith("ready")]
    assert len(ready) == 1
    assert stack.connection["base_url"] in ready[0]
    assert "openrelay/gpt-oss-120b, openrelay/gemma-4-31b" in stack.said
    assert "simulated" in stack.said


def test_connection_file(stack: Stack) -> None:
    connection = stack.connection
    assert set(connection) == {
        "base_url",
        "control_url",
        "api_key",
        "kafka_bootstrap",
        "clickhouse_url",
        "pids",
    }
    assert set(connection["pids"]) == ROLES
    assert connection["base_url"].endswith("/v1")
    assert connection["api_key"].startswith("or_")
    assert stat.S_IMODE(stack.connection_file.stat().st_mode) == 0o600


def test_the_key_opens_both_hosts(stack: Stack) -> None:
    connection = stack.connection
    assert _get(f"{connection['base_url']}/models", connection["api_key"]) == 200
    assert _get(f"{connection['control_url']}/v1/usage", connection["api_key"]) == 200
    assert _get(f"{connection['control_url']}/v1/usage", "or_not_this_key_0000") == 401
    assert _get(f"{connection['control_url']}/v1/files", None) == 404


def test_every_pid_is_the_process_that_serves(stack: Stack) -> None:
    connection = stack.connection
    listening = {
        "api": connection["base_url"],
        "control": connection["control_url"],
        "warehouse": connection["clickhouse_url"],
        "kafka": f"kafka://{connection['kafka_bootstrap']}/",
    }
    for role, url in listening.items():
        port = int(url.split("/")[2].rpartition(":")[2])
        listeners = [
            each.laddr
            for each in psutil.Process(connection["pids"][role]).net_connections("tcp")
            if each.status == psutil.CONN_LISTEN
        ]
        assert port in [address.port for address in listeners], role
        assert {address.ip.removeprefix("::ffff:") for address in listeners} == {"127.0.0.1"}, role


def test_finance_reads_the_usage_view(stack: Stack) -> None:
    client = clickhouse_connect.get_client(dsn=stack.connection["clickhouse_url"])
    result = client.query(
        "SELECT org_id, cost_nano_usd FROM billing.usage WHERE batch_id = {batch:String}",
        parameters={"batch": "none"},
    )
    assert result.column_names == ("org_id", "cost_nano_usd")
    client.close()


def test_secrets_are_the_owners(stack: Stack) -> None:
    for name in ("secrets.json", "run/settings.json"):
        file = stack.directory / "data" / name
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, name


@pytest.mark.parametrize("role", sorted(ROLES))
def test_a_killed_role_is_started_again_on_its_ports(stack: Stack, role: str) -> None:
    before = stack.connection
    began = time.monotonic()
    new = stack.kill(role)
    assert time.monotonic() - began < 30
    after = stack.connection
    assert psutil.pid_exists(new)
    assert {k: v for k, v in after.items() if k != "pids"} == {k: v for k, v in before.items() if k != "pids"}
    assert {k: v for k, v in after["pids"].items() if k != role} == {
        k: v for k, v in before["pids"].items() if k != role
    }
    assert f"{role} (pid {before['pids'][role]}) was ended by SIGKILL" in stack.said
    urls = {"api": f"{after['base_url']}/models", "control": f"{after['control_url']}/health"}
    if role in urls:
        stack.until(lambda: _serves(urls[role]), f"{role} does not answer", 30)


def test_a_second_one_on_the_same_directory_is_refused(stack: Stack) -> None:
    done = _up("--data", str(stack.directory / "data"), "--port", "0", "--control-port", "0")
    assert done.returncode == 1
    assert f"pid {stack.up.pid}" in done.stderr
    assert "--data" in done.stderr
    assert stack.connection_file.exists()


def test_what_customers_sent_is_for_this_user_only(stack: Stack) -> None:
    assert stat.S_IMODE((stack.directory / "data").stat().st_mode) == 0o700


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for option, other in (("--port", "--control-port"), ("--control-port", "--port")):
            done = _up("--data", str(tmp_path), option, str(port), other, "0")
            assert done.returncode == 1
            assert done.stderr.strip() == (
                f"openrelay: port {port} is taken by another program; choose another with {option}"
            )


@pytest.mark.parametrize(
    ("port", "control_port", "named"),
    [
        ("65536", "0", "--port"),
        ("0", "-1", "--control-port"),
        ("18001", "18001", "--port and --control-port"),
    ],
)
def test_ports_that_cannot_be_are_refused(tmp_path: Path, port: str, control_port: str, named: str) -> None:
    done = _up("--data", str(tmp_path / "data"), "--port", port, "--control-port", control_port)
    assert done.returncode == 2
    assert done.stderr.startswith(f"openrelay: {named}: ")
    assert not (tmp_path / "data").exists()


def test_faulty_settings_are_named_all_at_once(tmp_path: Path) -> None:
    config = tmp_path / "openrelay.toml"
    config.write_text('[limits]\nmax_attempts = 0\n[egress]\nallow_cidrs = ["10.0.0.0/33"]\n')
    for command in (["up", "--data", str(tmp_path / "data")], ["check"]):
        done = _run(*command, "--config", str(config))
        assert done.returncode == 2, done.stderr
    done = _up("--data", str(tmp_path / "data"), "--config", str(config))
    assert "limits.max_attempts" in done.stderr
    assert "egress.allow_cidrs[0]" in done.stderr


def test_settings_are_checked_with_and_without_the_option(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text("[limits]\nmax_attempts = 3\n")
    bad.write_text("[limits]\nmax_attempts = 0\n")
    for option in ([], ["--config"]):
        assert _run("check", *option, str(good)).returncode == 0
        refused = _run("check", *option, str(bad))
        assert (refused.returncode, "limits.max_attempts" in refused.stderr) == (2, True)
    assert _run("check", str(good), "--config", str(bad)).returncode == 2
    assert "AbortIncompleteMultipartUpload" not in _run("check", str(good)).stdout
    good.write_text('[storage]\nurl = "s3://bucket/prefix"\n')
    assert '"AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1}' in _run("check", str(good)).stdout


def test_an_unwritable_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = _up("--data", str(tmp_path / "file"))
    assert done.returncode == 1
    assert str(tmp_path / "file") in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def _up(*options: str) -> subprocess.CompletedProcess[str]:
    return _run("up", *options)


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*openrelay(), *arguments], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )


def _config(drain_s: float = 5) -> dict[str, Any]:
    return {
        "limits": {"drain_s": drain_s, "retry_backoff_s": 0.2},
        "organizations": [{"id": "org_acme", "api_keys": ["or_acme_key_0123456789"]}],
    }


def test_starting_stopping_and_what_is_kept(configured: Stack) -> None:
    connection = configured.connection
    assert connection["api_key"] == "or_acme_key_0123456789"
    assert set(connection["pids"]) == ROLES | {"dispatch-2"}
    client = clickhouse_connect.get_client(dsn=connection["clickhouse_url"])
    client.command("CREATE TABLE kept (a UInt8) ENGINE = MergeTree ORDER BY a")
    client.close()
    made = json.loads((configured.directory / "data" / "secrets.json").read_text())

    processes = configured.children()
    began = time.monotonic()
    assert configured.terminate() == 0
    assert time.monotonic() - began < 30
    assert not configured.connection_file.exists()
    assert not any(each.is_running() for each in processes)

    _start(configured)
    again = configured.connection
    assert {k: v for k, v in again.items() if k != "pids"} == {
        k: v for k, v in connection.items() if k != "pids"
    }
    client = clickhouse_connect.get_client(dsn=again["clickhouse_url"])
    assert client.command("EXISTS TABLE kept") == 1
    client.close()
    assert json.loads((configured.directory / "data" / "secrets.json").read_text()) == made


@pytest.mark.faults
def test_if_it_is_killed_its_children_end_and_the_next_start_works(tmp_path: Path) -> None:
    stack = Stack(tmp_path, _config()).start()
    processes = stack.children()
    assert len(processes) >= len(ROLES)
    stack.kill_all()
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert alive == []
    assert stack.connection_file.exists()
    stack.launch()
    stack.until(
        lambda: stack.ready_line is not None or not stack.connection_file.exists(), "the old file stayed", 30
    )
    stack.until(lambda: stack.ready_line is not None, "not ready", 60)
    assert stack.terminate() == 0


def test_it_stops_while_it_starts(tmp_path: Path) -> None:
    stack = Stack(tmp_path, _config())
    stack.launch()
    log = tmp_path / "data" / "logs" / "kafka.log"
    stack.until(log.exists, "the broker was not started", 30)
    processes = stack.children()
    assert stack.terminate() == 0
    assert psutil.wait_procs(processes, timeout=5)[1] == []


def test_settings_are_read_again(configured: Stack) -> None:
    settings = configured.directory / "data" / "run" / "settings.json"
    config = _config()
    config["organizations"].append({"id": "org_new", "api_keys": ["or_new_key_0123456789"]})
    configured.configure(config)
    configured.up.send_signal(signal.SIGHUP)
    configured.until(lambda: "the settings were read again" in configured.said, "nothing was said", 30)
    assert [each["id"] for each in json.loads(settings.read_text())["organizations"]] == [
        "org_acme",
        "org_new",
    ]
    url = f"{configured.connection['base_url']}/models"
    configured.until(lambda: _allowed(url, "or_new_key_0123456789"), "the new key is not known", 30)

    config["limits"]["max_attempts"] = 0
    configured.configure(config)
    configured.up.send_signal(signal.SIGHUP)
    configured.until(lambda: "limits.max_attempts" in configured.said, "the fault was not said", 30)
    assert json.loads(settings.read_text())["limits"]["max_attempts"] == 5


def test_settings_that_cannot_be_taken_now_change_nothing_and_are_tried_again(configured: Stack) -> None:
    """The broker has other partitions, the warehouse is away: everybody runs on as before."""
    settings = configured.directory / "data" / "run" / "settings.json"
    before, pids = settings.read_text(), configured.connection["pids"]
    config = _config()
    config["kafka"] = {"partitions": 99}
    configured.configure(config)
    configured.up.send_signal(signal.SIGHUP)
    configured.until(lambda: "which cannot be" in configured.said, "nothing was said", 60)
    assert settings.read_text() == before
    assert configured.connection["pids"] == pids

    done = configured.said.count("the settings were read again")
    del config["kafka"]
    config["organizations"].append({"id": "org_later", "api_keys": ["or_later_key_0123456789"]})
    configured.configure(config)
    configured.kill("warehouse")
    configured.up.send_signal(signal.SIGHUP)
    configured.until(
        lambda: configured.said.count("the settings were read again") > done, "they were not read", 90
    )
    url = f"{configured.connection['base_url']}/models"
    configured.until(lambda: _allowed(url, "or_later_key_0123456789"), "the new key is not known", 30)


def _since(log: Path, pid: int) -> str:
    """What the process wrote, in a log that others wrote to before."""
    return "\n".join(line for line in log.read_text().splitlines() if f'"pid": {pid}' in line)


def test_a_dispatcher_that_starts_takes_settings_that_come_meanwhile(configured: Stack) -> None:
    """A hangup waits until there is somebody who hears it."""
    for _ in range(3):
        configured.kill("dispatch")
        configured.send("dispatch", signal.SIGHUP)
    log = configured.directory / "data" / "logs" / "dispatch.log"
    configured.until(lambda: "settings read again" in _since(log, configured.pid("dispatch")), "not read", 60)
    assert "ended by SIGHUP" not in configured.said


class Caller:
    """Asks again and again, in a thread; counts what it is answered: statuses, or names of exceptions."""

    def __init__(self, url: str, key: str, *, keep_alive: bool) -> None:
        self.answers: Counter[str] = Counter()
        self._url = url
        self._headers = {"Authorization": f"Bearer {key}"}
        self._keep_alive = keep_alive
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Caller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        most = httpx.Limits(max_keepalive_connections=1 if self._keep_alive else 0)
        with httpx.Client(headers=self._headers, limits=most, timeout=30, trust_env=False) as client:
            while not self._ending.is_set():
                try:
                    self.answers[str(client.get(self._url).status_code)] += 1
                except httpx.HTTPError as error:
                    self.answers[type(error).__name__] += 1


@contextmanager
def _callers(stack: Stack) -> Iterator[list[Caller]]:
    """Callers of both hosts, with a connection for each request and with one for many."""
    where = stack.connection
    urls = [f"{where['base_url']}/batches", f"{where['control_url']}/v1/prices"]
    with ExitStack() as entered:
        yield [
            entered.enter_context(Caller(url, where["api_key"], keep_alive=keep))
            for url in urls
            for keep in (False, True)
        ]


@pytest.mark.faults
def test_while_settings_are_read_again_everybody_is_served(tmp_path: Path) -> None:
    with Stack(tmp_path, _config()) as stack, _callers(stack) as callers:
        for times in (1, 2):
            before = stack.connection["pids"]
            stack.up.send_signal(signal.SIGHUP)
            stack.until(
                lambda times=times: stack.said.count("the settings were read again") == times,
                "nothing was said",
                60,
            )
            after = stack.connection["pids"]
            for role in ("api", "control"):
                assert after[role] != before[role]
                assert psutil.pid_exists(after[role])
                assert not psutil.pid_exists(before[role])
        with httpx.Client(headers={"Authorization": f"Bearer {stack.connection['api_key']}"}) as client:
            url = f"{stack.connection['base_url']}/batches"
            record = {"custom_id": "a", "body": {"model": "openrelay/gpt-oss-120b", "messages": []}}
            fields = {"endpoint": "/v1/chat/completions", "completion_window": "24h", "requests": [record]}
            batch = client.post(url, json=fields).json()["id"]
            stack.until(
                lambda: client.get(f"{url}/{batch}").json()["status"] == "completed", "no batch ends", 30
            )
    for caller in callers:
        assert list(caller.answers) == ["200"], caller.answers


def test_while_a_host_is_started_again_callers_wait(stack: Stack) -> None:
    with _callers(stack) as callers:
        for role in ("api", "control"):
            stack.kill(role)
            served = [sum(caller.answers.values()) for caller in callers]
            stack.until(
                lambda served=served: all(
                    sum(caller.answers.values()) > before + 10
                    for caller, before in zip(callers, served, strict=True)
                ),
                "not everybody is answered",
                60,
            )
    for caller in callers:
        # An answer under way when the process was killed is lost; no connection is refused.
        assert set(caller.answers) <= {"200", "ReadError", "RemoteProtocolError"}, caller.answers
        assert caller.answers.total() - caller.answers["200"] <= 1, caller.answers


def _allowed(url: str, key: str) -> bool:
    try:
        return _get(url, key) == 200
    except OSError:
        return False


def test_variables_override_the_file_once(configured: Stack) -> None:
    settings = json.loads((configured.directory / "data" / "run" / "settings.json").read_text())
    assert settings["limits"]["retry_backoff_s"] == 0.3
    role = psutil.Process(configured.pid("dispatch"))
    assert not [name for name in role.environ() if name.startswith("OPENRELAY_LIMITS")]


def test_a_folder_called_services_is_not_ours(configured: Stack) -> None:
    assert configured.kill("dispatch")
