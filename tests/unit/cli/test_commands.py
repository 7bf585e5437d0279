"""`orl` as a user meets it: what it prints where, and its exit status."""

from __future__ import annotations

import contextlib
import io
import json
import stat
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from services.cli import batches, client, openrelay, submission
from services.cli.output import money
from services.embedded.ports import free_port
from tests.unit.cli.conftest import Orl
from tests.unit.cli.standin import KEY, StandIn

CHAT = "/v1/chat/completions"


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    path = tmp_path / "requests.jsonl"
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    record = {"custom_id": "a", "method": "POST", "url": CHAT, "body": body}
    path.write_text(json.dumps(record) + "\n" + json.dumps(record | {"custom_id": "b"}) + "\n")
    return path


def create(path: Path, *more: str) -> tuple[str, ...]:
    return ("batches", "create", "--input-file", str(path), "--endpoint", CHAT, *more)


def error_line(custom_id: str | None, status: int | None, body: Any, error: Any) -> dict[str, Any]:
    response = None if status is None else {"status_code": status, "request_id": "r", "body": body}
    return {"id": "batch_req_1", "custom_id": custom_id, "response": response, "error": error}


def test_login_stores_the_key_for_this_user_only(home: Path, server: StandIn, orl: Orl) -> None:
    done = orl("auth", "login", "--with-token", "--base-url", server.base_url, stdin=f"{KEY}\n")
    assert (done.status, done.out) == (0, "")
    assert KEY not in done.err
    stored = home / "config" / "openrelay" / "credentials.json"
    assert stat.S_IMODE(stored.stat().st_mode) == 0o600
    assert orl("batches", "list").status == 0
    assert orl("auth", "status").out == f"server\t{server.base_url}\nmodels\tm\n"
    assert json.loads(orl("auth", "status", "--json").out)["models"] == ["m"]
    assert orl("auth", "logout").status == 0
    assert orl("batches", "list").status == 3
    assert orl("auth", "logout").status == 2


def test_an_argument_that_is_not_utf_8_is_named(logged_in: Path, requests: Path, orl: Orl) -> None:
    for words in (("files", "delete", "\udcff"), create(requests, "--metadata", "\udcff=x")):
        done = orl(*words)
        assert (done.status, done.out) == (2, "")
        assert done.err == f"orl: The argument {words[-1]!r} is not UTF-8.\n"


def test_login_refuses_a_key_the_server_refuses(home: Path, server: StandIn, orl: Orl) -> None:
    url = ("--base-url", server.base_url)
    done = orl("auth", "login", "--with-token", *url, stdin="or_wrong\n")
    assert (done.status, done.err) == (
        3,
        "orl: The API key is not valid. [invalid_api_key, request req_42]\n",
    )
    assert not (home / "config").exists()
    assert orl("auth", "login", "--with-token", *url, stdin="").status == 2
    assert orl("auth", "login", "--with-token", *url, stdin="two words\n").status == 2
    assert orl("auth", "login", *url).status == 2
    assert orl("auth", "login", "--with-token", "--base-url", "nonsense", stdin=KEY).status == 2


def test_login_without_a_server_to_ask_stores_and_says_so(
    home: Path, orl: Orl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "PATIENCE_S", 0.2)
    done = orl("auth", "login", "--with-token", "--base-url", "http://127.0.0.1:9/v1", stdin=KEY)
    assert done.status == 0
    assert "could not be tried" in done.err


def test_no_key_exits_3_and_says_how_to_get_one(home: Path, orl: Orl) -> None:
    done = orl("batches", "list")
    assert (done.status, done.out) == (3, "")
    assert done.err.count("\n") == 1
    assert "orl auth login" in done.err
    assert "openrelay up" in done.err


def test_mistakes_on_the_command_line_exit_2(logged_in: Path, requests: Path, orl: Orl) -> None:
    assert orl("batches", "create").status == 2
    assert orl("nonsense").status == 2
    assert orl("batches", "create", "--endpoint", CHAT).status == 2
    assert orl(*create(requests, "--input-file-id", "file-1")).status == 2
    assert orl(*create(requests, "--priority", "fast")).status == 2
    assert orl(*create(requests, "--metadata", "novalue")).status == 2
    assert orl(*create(requests, "--metadata", "a=1", "--metadata", "a=2")).status == 2
    assert orl("batches", "create", "--input-file", str(requests), "--endpoint", "/v1/embeddings").status == 2
    assert orl(*create(requests.with_name("none.jsonl"))).status == 2


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (("batches", "get"), "BATCH_ID"),
        (("batches", "wait"), "BATCH_ID"),
        (("batches", "results"), "BATCH_ID"),
        (("batches", "cancel"), "BATCH_ID"),
        (("files", "get"), "FILE_ID"),
        (("files", "delete"), "FILE_ID"),
        (("files", "content", "get"), "FILE_ID"),
        (("files", "upload"), "FILE"),
    ],
)
def test_a_missing_argument_is_named_as_it_is_given(
    logged_in: Path, orl: Orl, words: tuple[str, ...], missing: str
) -> None:
    done = orl(*words)
    assert done.status == 2
    assert f"parameter {missing} requires an argument" in done.err


def test_both_commands_have_one_version(orl: Orl) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as said, pytest.raises(SystemExit):
        openrelay.app(["--version"])
    assert said.getvalue() == orl("--version").out == version("openrelay-batch") + "\n"


def test_a_killed_stack_is_not_waited_for(home: Path, orl: Orl, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://127.0.0.1:{free_port()}/v1"
    where = home / "data" / "openrelay"
    where.mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait()
    left = {"base_url": url, "control_url": url, "api_key": KEY, "pids": {"api": dead.pid}}
    (where / "connection.json").write_text(json.dumps(left))
    done = orl("batches", "list")
    assert done.status == 3
    assert "the last one was killed" in done.err
    assert "OPENRELAY_DATA_DIR" in done.err
    monkeypatch.setenv("OPENRELAY_BASE_URL", url)
    monkeypatch.setenv("OPENRELAY_API_KEY", KEY)
    done = orl("batches", "list")
    assert (done.status, done.err) == (
        5,
        f"orl: The stack in {where} was killed and does not run any more: start it again with "
        f"`openrelay up --data {where}`.\n",
    )


def test_a_server_that_cannot_be_reached_exits_5(
    logged_in: Path, orl: Orl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENRELAY_BASE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setattr(client, "PATIENCE_S", 0.2)
    done = orl("batches", "list")
    assert done.status == 5
    assert "`openrelay up` starts one" in done.err


def test_files(logged_in: Path, server: StandIn, requests: Path, orl: Orl, tmp_path: Path) -> None:
    done = orl("files", "upload", str(requests))
    assert done.err == f"uploaded {requests} as file-0\n"
    stored = json.loads(done.out)
    assert stored == json.loads(orl("files", "get", "file-0").out)
    assert orl("files", "list").out.startswith(f"file-0\tbatch\t{requests.stat().st_size}\t")
    assert json.loads(orl("files", "list", "--json").out)["data"] == [stored]
    assert orl("files", "content", "get", "file-0").out == requests.read_text()
    copy = tmp_path / "copy.jsonl"
    assert orl("files", "content", "get", "file-0", "-o", str(copy)).status == 0
    assert copy.read_bytes() == requests.read_bytes()
    assert json.loads(orl("files", "delete", "file-0", "--json").out)["deleted"] is True
    done = orl("files", "content", "get", "file-0", "-o", str(copy))
    assert (done.status, done.err) == (2, "orl: There is no such thing. [not_found, request req_42]\n")
    assert copy.read_bytes() == requests.read_bytes()
    assert sorted(path.name for path in tmp_path.glob("*copy*")) == ["copy.jsonl"]


def test_create_prints_the_upload_on_stderr_and_the_batch_on_stdout(
    logged_in: Path, server: StandIn, requests: Path, orl: Orl
) -> None:
    done = orl(*create(requests, "--priority", "expedited", "--metadata", "a=1", "--metadata", "b=x=y"))
    assert done.err == f"uploaded {requests} as file-0\n"
    batch = json.loads(done.out)
    assert (batch["status"], batch["priority"]) == ("validating", "expedited")
    assert batch["metadata"] == {"a": "1", "b": "x=y"}
    assert done.status == 0
    again = json.loads(orl("batches", "create", "--input-file-id", "file-0", "--endpoint", CHAT).out)
    assert again["input_file_id"] == "file-0"
    assert json.loads(orl("batches", "get", batch["id"]).out)["id"] == batch["id"]
    lines = orl("batches", "list").out.splitlines()
    assert [line.split("\t")[0] for line in lines] == ["batch_1", "batch_0"]


def test_create_and_wait_prints_the_end_and_what_was_rejected(
    logged_in: Path, server: StandIn, requests: Path, orl: Orl
) -> None:
    server.errors = [
        {"code": "invalid_json", "message": "Not JSON.", "param": None, "line": 3, "custom_id": None},
        {"code": "missing_model", "message": "No model.", "param": "m", "line": 4, "custom_id": "d"},
    ]
    server.end = {"status": "completed", "completed": 2, "failed": 2}
    server.error_lines = [
        error_line(
            None, None, None, {"code": "invalid_json", "message": "Not JSON.", "param": None, "line": 3}
        ),
        error_line("d", 400, {"error": {"message": "Too long."}}, None),
    ]
    done = orl(*create(requests, "--wait"))
    assert done.status == 1
    assert json.loads(done.out)["status"] == "completed"
    assert done.err.splitlines() == [
        f"uploaded {requests} as file-0",
        "created batch_0",
        "rejected: line 3: Not JSON. [invalid_json]",
        "rejected: line 4 (d): No model. [missing_model]",
        "batch_0 validating: 0 completed, 0 failed of 0",
        "batch_0 in_progress: 0 completed, 0 failed of 4",
        "batch_0 finalizing: 2 completed, 2 failed of 4",
        "failed: d: Too long. [HTTP 400]",
        "failed: 2 in all: 1 invalid_json, 1 HTTP 400",
        "batch_0 completed: 2 completed, 2 failed of 4; 0 input and 0 output tokens, $0.00",
    ]


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ({"status": "completed", "completed": 2, "failed": 0}, 0),
        ({"status": "completed", "completed": 0, "failed": 2}, 1),
        ({"status": "failed", "completed": 0, "failed": 2}, 1),
        ({"status": "expired", "completed": 1, "failed": 1}, 4),
        ({"status": "cancelled", "completed": 0, "failed": 2}, 4),
    ],
)
def test_wait_and_results_exit_by_how_the_batch_ended(
    logged_in: Path,
    server: StandIn,
    requests: Path,
    orl: Orl,
    tmp_path: Path,
    end: dict[str, Any],
    status: int,
) -> None:
    server.end = end
    server.error_lines = [error_line(str(n), 400, None, None) for n in range(end["failed"])]
    orl(*create(requests))
    server.hold.clear()
    refused = orl("batches", "results", "batch_0")
    assert refused.status == 2
    assert "orl batches wait batch_0" in refused.err
    server.hold.set()
    assert orl("batches", "wait", "batch_0").status == status
    done = orl("batches", "results", "batch_0", "-o", str(tmp_path / "out"))
    assert done.status == status
    assert done.err.count(" [HTTP 400]\n") == end["failed"]
    for name, count in (("output", end["completed"]), ("error", end["failed"])):
        path = tmp_path / "out" / f"batch_0-{name}.jsonl"
        assert path.exists() == (count > 0)
        if count:
            assert path.read_text().count("\n") == count
            assert f"{name}\t{path}\t{count} lines\n" in done.out


def test_results_that_contradict_the_counts_are_not_trusted(
    logged_in: Path, server: StandIn, requests: Path, orl: Orl
) -> None:
    server.end = {"status": "completed", "completed": 1, "failed": 1}
    orl(*create(requests, "--wait"))
    done = orl("batches", "results", "batch_0")
    assert done.status == 5
    assert "The error file has 0 lines where the batch counts 1." in done.err


def test_a_result_file_that_is_gone_is_named_and_the_other_one_comes(
    logged_in: Path, server: StandIn, requests: Path, orl: Orl, tmp_path: Path
) -> None:
    server.end = {"status": "completed", "completed": 1, "failed": 1}
    server.error_lines = [error_line("b", 400, None, None)]
    orl(*create(requests, "--wait"))
    del server.files["file-batch_0-output"]
    done = orl("batches", "results", "batch_0", "-o", str(tmp_path / "out"))
    assert done.status == 2
    said = "orl: The output file of batch_0, file-batch_0-output, is gone: it was deleted or has expired.\n"
    assert done.err.endswith(said)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["batch_0-error.jsonl"]
    del server.files["file-batch_0-error"]
    waited = orl("batches", "wait", "batch_0")
    assert waited.status == 1
    assert "The error file of batch_0, file-batch_0-error, is gone" in waited.err


def test_cancel(logged_in: Path, server: StandIn, requests: Path, orl: Orl) -> None:
    orl(*create(requests))
    assert json.loads(orl("batches", "cancel", "batch_0").out)["status"] == "cancelling"
    assert orl("batches", "cancel", "batch_9").status == 2
    assert orl("batches", "get", "../batches/batch_0?x=1#").status == 2


def test_waiting_sits_out_a_server_that_is_away(
    logged_in: Path, server: StandIn, requests: Path, orl: Orl, monkeypatch: pytest.MonkeyPatch
) -> None:
    orl(*create(requests))
    monkeypatch.setattr("services.cli.client.MAX_PAUSE_S", 0.05)
    troubles: list[Any] = [(503, {}), "lost", (502, {})]
    server.trouble.extend([("GET", "/batches/batch_0", what) for what in troubles])
    done = orl("batches", "wait", "batch_0")
    assert done.status == 0
    assert done.err.count("trying again") == 3


def test_a_create_that_was_answered_is_not_resumed(
    logged_in: Path, server: StandIn, requests: Path, orl: Orl
) -> None:
    assert json.loads(orl(*create(requests)).out)["id"] == "batch_0"
    assert json.loads(orl(*create(requests)).out)["id"] == "batch_1"
    orl(*create(requests, "--wait"))
    orl(*create(requests, "--wait"))
    assert len(server.created) == 4


def test_a_create_that_got_no_answer_is_resumed(
    logged_in: Path, server: StandIn, requests: Path, orl: Orl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "LONG_PATIENCE_S", 0.2)
    server.trouble.extend([("POST", "/batches", "lost")] * 40)
    assert orl(*create(requests)).status == 5
    server.trouble.clear()
    assert server.created == ["batch_0"]
    done = orl(*create(requests))
    assert (json.loads(done.out)["id"], server.created) == ("batch_0", ["batch_0"])
    assert "going on with batch_0" in done.err
    assert server.count("POST", "/files") == 1
    assert json.loads(orl(*create(requests)).out)["id"] == "batch_1"


def test_a_note_older_than_the_key_is_settled_by_looking_for_its_file(
    logged_in: Path, server: StandIn, requests: Path, orl: Orl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "LONG_PATIENCE_S", 0.2)
    server.trouble.extend([("POST", "/batches", "lost")] * 40)
    orl(*create(requests))
    server.trouble.clear()
    monkeypatch.setattr(submission, "KEY_LIFE_S", 0)
    server.keys.clear()
    assert json.loads(orl(*create(requests)).out)["id"] == "batch_0"


def test_a_refused_create_leaves_no_note(logged_in: Path, server: StandIn, requests: Path, orl: Orl) -> None:
    server.trouble.append(("POST", "/batches", (400, {})))
    done = orl(*create(requests))
    assert (done.status, done.err.splitlines()[1]) == (2, "orl: Trouble 400. [trouble, request req_1]")
    assert "going on" not in orl(*create(requests)).err


def test_tools_are_warned_about(logged_in: Path, server: StandIn, tmp_path: Path, orl: Orl) -> None:
    body = {"model": "m", "messages": [], "openrelay": {"tool_config": {"url": "https://x.example"}}}
    path = tmp_path / "tools.jsonl"
    path.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": CHAT, "body": body}) + "\n")
    done = orl(*create(path))
    assert done.status == 0
    assert "1 of 1 records call tools: this batch may take up to 9 model calls" in done.err
    body["openrelay"] = {"workflow": {"url": "https://x.example"}}
    with path.open("a") as file:
        file.write(json.dumps({"custom_id": "b", "method": "POST", "url": CHAT, "body": body}) + "\n")
    said = (
        "1 of 2 records call tools and 1 of 2 records are workflows: this batch may take up to 73 model calls"
    )
    assert said in orl(*create(path)).err


def test_tools_in_an_uploaded_file_are_warned_about(
    logged_in: Path, server: StandIn, orl: Orl, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"model": "m", "messages": [], "openrelay": {"tool_config": {"url": "https://x.example"}}}
    record = json.dumps({"custom_id": "a", "method": "POST", "url": CHAT, "body": body}).encode()
    server.files["file-0"] = b"\xef\xbb\xbf" + record.replace(b"tool_config", b"tool\\u005fconfig")
    asked = ("batches", "create", "--endpoint", CHAT, "--input-file-id")
    assert "1 of 1 records call tools: this batch may take up to 9" in orl(*asked, "file-0").err
    assert "model calls" not in orl(*asked, "file-0", "--yes", "--new").err
    assert server.count("GET", "/files/file-0/content") == 1
    monkeypatch.setattr(batches, "MOST_LOOKED_AT_BYTES", 10)
    done = orl(*asked, "file-0", "--new")
    assert done.status == 0
    assert "file-0 is too large to look for tools and workflows" in done.err
    assert server.count("GET", "/files/file-0/content") == 1


class Typed(io.StringIO):
    """What is typed at a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("written", ["stderr", "stdout"])
def test_who_sits_at_a_terminal_is_asked(
    logged_in: Path,
    server: StandIn,
    tmp_path: Path,
    orl: Orl,
    monkeypatch: pytest.MonkeyPatch,
    written: str,
) -> None:
    body = {"model": "m", "messages": [], "openrelay": {"tool_config": {"url": "https://x.example"}}}
    path = tmp_path / "tools.jsonl"
    path.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": CHAT, "body": body}) + "\n")
    monkeypatch.setattr(io, "StringIO", Typed)
    monkeypatch.setattr(getattr(sys, written), "isatty", lambda: True)
    done = orl(*create(path), stdin="n\n")
    shown = done.err if written == "stderr" else done.out
    assert done.status == 2
    assert "up to 9 model calls\nGo on? [y/N] " in shown
    assert "Nothing was submitted." in done.err
    assert not server.batches
    assert orl(*create(path), stdin="y\n").status == 0
    assert server.batches


def test_text_from_the_server_cannot_steer_the_terminal(
    logged_in: Path, server: StandIn, requests: Path, orl: Orl
) -> None:
    server.errors = [
        {"code": "x", "message": "\x1b[2J[bold]red", "param": None, "line": 1, "custom_id": "\x07\nrejected"}
    ]
    done = orl(*create(requests))
    assert "rejected: line 1 (??rejected): ?[2J[bold]red [x]\n" in done.err


def test_usage_and_lag_come_from_the_control_host(
    logged_in: Path, server: StandIn, orl: Orl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENRELAY_CONTROL_URL", server.base_url.removesuffix("/v1"))
    assert orl("usage").out == "m\t3\t30\t5\t7\t$1.2345\n"
    asked = json.loads(orl("usage", "--group-by", "day,tier", "--start", "2026-11-01", "--json").out)
    assert asked["data"][0]["group_by"] == "day,tier"
    assert asked["data"][0]["start"] == "2026-11-01"
    assert orl("lag").out == "settle\tresults\t8\t3\n"
    assert json.loads(orl("lag", "--json").out)["data"][0]["lag"] == 3
    monkeypatch.delenv("OPENRELAY_CONTROL_URL")
    monkeypatch.setenv("OPENRELAY_BASE_URL", "https://example.com/v1")
    unknown = orl("usage")
    assert unknown.status == 2
    assert "OPENRELAY_CONTROL_URL" in unknown.err


def test_a_control_host_that_was_guessed_wrong_is_named(
    logged_in: Path, server: StandIn, orl: Orl, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setattr(client, "PATIENCE_S", 0.2)
    monkeypatch.setenv("OPENRELAY_BASE_URL", f"http://127.0.0.1:{port - 1}/v1")
    monkeypatch.setenv("OPENRELAY_API_KEY", "or_some_key_0123456789")
    for command in ("usage", "lag"):
        done = orl(command)
        assert done.status == 5
        for part in (f"http://127.0.0.1:{port},", "OPENRELAY_CONTROL_URL", "--control-url"):
            assert part in done.err


@pytest.mark.parametrize(
    ("nano_usd", "text"),
    [(0, "$0.00"), (1, "$0.000000001"), (1_500_000_000, "$1.50"), (-20_000_000_000, "-$20.00")],
)
def test_money_is_exact(nano_usd: int, text: str) -> None:
    assert money(nano_usd) == text
