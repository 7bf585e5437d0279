"""The quickstart, line by line, in every client it is written for, against a whole stack.

And `orl batches create --wait`, which outlives its own death, and the server's.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.clients.installed import HERE, node_sdk, python_sdk
from tests.support.command import ROOT
from tests.support.stack import Stack

CHAT = "/v1/chat/completions"
MODEL = "openrelay/gpt-oss-120b"
REQUESTS = {"req-1": "Name three primary colors.", "req-2": "Name three prime numbers."}
ANSWERS = {name: f"You asked: {asked}" for name, asked in REQUESTS.items()}
ORL = f"{shlex.quote(sys.executable)} -P -m services.cli.orl"
WAIT = f"exec {ORL} batches create --input-file slow.jsonl --endpoint {CHAT} --wait"
TERMINAL = ("completed", "failed", "expired", "cancelled")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("quickstart")) as running:
        yield running


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A directory with the quickstart's input, and one whose records take a while."""
    slow = {f"slow-{number}": f"slow:3 record {number}" for number in range(20)}
    for name, prompts in (("requests.jsonl", REQUESTS), ("slow.jsonl", slow)):
        lines = [json.dumps(record(custom_id, asked)) for custom_id, asked in prompts.items()]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    return tmp_path


def record(custom_id: str, asked: str) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": asked}]}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def environment(stack: Stack, work: Path, *, key: bool = True) -> dict[str, str]:
    """A user's environment: a home of its own, and the key unless they log in."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OPENRELAY_")}
    kept |= {"HOME": str(work), "PYTHONPATH": str(ROOT)}
    kept |= {f"XDG_{name}_HOME": str(work / f".{name.lower()}") for name in ("CONFIG", "STATE", "DATA")}
    if key:
        connection = stack.connection
        for name in ("base_url", "control_url", "api_key"):
            kept[f"OPENRELAY_{name.upper()}"] = connection[name]
    return kept


def sh(stack: Stack, work: Path, script: str, *, key: bool = True, status: int = 0) -> tuple[str, str]:
    """Run lines of shell as a user types them; what they printed, on both streams."""
    done = subprocess.run(
        ["bash", "-euc", script],
        cwd=work,
        env=environment(stack, work, key=key),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == status, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout, done.stderr


def results(path: Path) -> dict[str, str]:
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return {line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in lines}


def seen_by_an_sdk(stack: Stack, work: Path, command: list[str]) -> dict[str, Any]:
    done = subprocess.run(
        command, cwd=work, env=environment(stack, work), capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


def check_sdk(seen: dict[str, Any], version: str) -> None:
    """What every SDK must have seen."""
    assert seen.pop("version").split(".")[0] == version
    assert seen == {
        "file": ["file", "batch", "processed"],
        "filename_follows_id": True,
        "bytes": True,
        "created": ["validating", 0, 0, 0],
        "batch_input": True,
        "metadata": {"from": "the SDK"},
        "ended": ["completed", 2, 2, 0],
        "output_file": True,
        "error_file": None,
        "usage": [8, 12, 20],
        "results": ANSWERS,
        "file_again": True,
        "input_content": True,
        "listed": True,
        "unknown_purpose": [],
        "paged": True,
        "paged_once": True,
        "page": [2, True],
        "in_use": ["ConflictError", 409, "file_in_use"],
        "cancel": "cancelling",
        "cancelled": ["cancelled", 20, 20],
        "cancel_again": ["ConflictError", 409, "batch_not_cancellable"],
        "deleted": [True, True],
        "gone": ["NotFoundError", 404, "not_found"],
        "unknown_batch": ["NotFoundError", 404, "not_found"],
        "stranger": ["AuthenticationError", 401, "invalid_api_key"],
    }


def test_openai_python_sdk(stack: Stack, work: Path) -> None:
    command = [sys.executable, str(HERE / "quickstart.py")]
    check_sdk(seen_by_an_sdk(stack, work, command), "3")


def test_openai_python_sdk_one_major_version_back(stack: Stack, work: Path) -> None:
    command = [str(python_sdk("openai-2.txt")), str(HERE / "quickstart.py")]
    check_sdk(seen_by_an_sdk(stack, work, command), "2")


def test_openai_node_sdk(stack: Stack, work: Path) -> None:
    command = ["node", str(HERE / "quickstart.mjs"), str(node_sdk())]
    check_sdk(seen_by_an_sdk(stack, work, command), "6")


def test_curl(stack: Stack, work: Path) -> None:
    upload = """
    curl -s $OPENRELAY_BASE_URL/files \
      -H "Authorization: Bearer $OPENRELAY_API_KEY" \
      -F "purpose=batch" \
      -F "file=@requests.jsonl"
    """
    file = json.loads(sh(stack, work, upload)[0])
    assert file.keys() >= {"id", "object", "bytes", "created_at", "expires_at", "filename", "purpose"}
    assert (file["object"], file["bytes"]) == ("file", (work / "requests.jsonl").stat().st_size)
    assert file["filename"] == f"{file['id']}.jsonl"
    assert file["expires_at"] - file["created_at"] == 30 * 86_400

    create = f"""
    curl -s $OPENRELAY_BASE_URL/batches \
      -H "Authorization: Bearer $OPENRELAY_API_KEY" \
      -H "Content-Type: application/json" \
      -d '{{
        "input_file_id": "{file["id"]}",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h"
      }}'
    """
    batch = json.loads(sh(stack, work, create)[0])
    assert (batch["object"], batch["status"], batch["input_file_id"]) == ("batch", "validating", file["id"])
    assert batch["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
    assert batch["expires_at"] - batch["created_at"] == 86_400

    poll = f"""
    curl -s $OPENRELAY_BASE_URL/batches/{batch["id"]} \
      -H "Authorization: Bearer $OPENRELAY_API_KEY"
    """
    deadline = time.monotonic() + 120
    while batch["status"] not in TERMINAL:
        assert time.monotonic() < deadline, batch
        time.sleep(0.1)
        batch = json.loads(sh(stack, work, poll)[0])
    assert batch["status"] == "completed"
    assert batch["output_file_id"] == f"file-{batch['id']}-output"
    assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    # 8 words asked and 12 answered, at half of $0.15 and $0.60 a million.
    usage = batch["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["cost_nano_usd"]) == (8, 12, 600 + 3600)

    download = f"""
    curl -s $OPENRELAY_BASE_URL/files/{batch["output_file_id"]}/content \
      -H "Authorization: Bearer $OPENRELAY_API_KEY" \
      -o results.jsonl
    """
    sh(stack, work, download)
    assert results(work / "results.jsonl") == ANSWERS


def test_curl_with_the_requests_in_the_body(stack: Stack, work: Path) -> None:
    requests = [{"custom_id": name, "body": record(name, asked)["body"]} for name, asked in REQUESTS.items()]
    body = {"requests": requests, "endpoint": CHAT, "completion_window": "24h"}
    (work / "body.json").write_text(json.dumps(body))
    create = """
    curl -s $OPENRELAY_BASE_URL/batches \
      -H "x-api-key: $OPENRELAY_API_KEY" \
      -H "Content-Type: application/json" \
      -d @body.json
    """
    batch = json.loads(sh(stack, work, create)[0])
    assert json.loads(sh(stack, work, f"{ORL} batches wait {batch['id']}")[0])["status"] == "completed"
    sh(stack, work, f"{ORL} files content get file-{batch['id']}-output -o results.jsonl")
    assert results(work / "results.jsonl") == ANSWERS


def test_orl(stack: Stack, work: Path) -> None:
    create = f"{ORL} batches create --input-file requests.jsonl --endpoint /v1/chat/completions"
    out, err = sh(stack, work, create)
    batch = json.loads(out)
    uploaded = re.fullmatch(r"uploaded requests\.jsonl as (file-[0-9a-f]+)\n", err)
    assert uploaded is not None
    assert (batch["status"], batch["input_file_id"]) == ("validating", uploaded[1])

    ended = json.loads(sh(stack, work, f"{ORL} batches wait {batch['id']}")[0])
    assert ended["status"] == "completed"
    assert json.loads(sh(stack, work, f"{ORL} batches get {batch['id']}")[0]) == ended
    listed = sh(stack, work, f"{ORL} batches list")[0].splitlines()
    assert listed[0].split("\t")[:2] == [batch["id"], "completed"]

    sh(stack, work, f"{ORL} files content get {ended['output_file_id']} -o results.jsonl")
    assert results(work / "results.jsonl") == ANSWERS

    file = json.loads(sh(stack, work, f"{ORL} files upload slow.jsonl")[0])
    out, _ = sh(stack, work, f"{ORL} batches create --input-file-id {file['id']} --endpoint {CHAT}")
    slow = json.loads(out)["id"]
    assert json.loads(sh(stack, work, f"{ORL} batches cancel {slow}")[0])["status"] == "cancelling"
    assert json.loads(sh(stack, work, f"{ORL} batches wait {slow}", status=4)[0])["status"] == "cancelled"
    assert json.loads(sh(stack, work, f"{ORL} files delete {file['id']}")[0])["deleted"] is True


def test_orl_auth_login_is_enough(stack: Stack, work: Path) -> None:
    _, err = sh(stack, work, f"{ORL} batches list", key=False, status=3)
    assert "orl auth login" in err
    key, url = stack.connection["api_key"], stack.connection["base_url"]
    sh(stack, work, f"echo {key} | {ORL} auth login --with-token --base-url {url}", key=False)
    sh(stack, work, f"{ORL} batches list", key=False)
    sh(stack, work, f"echo or_wrong | {ORL} auth login --with-token --base-url {url}", key=False, status=3)


def test_orl_finds_the_running_stack(stack: Stack, work: Path) -> None:
    (work / ".data").mkdir()
    (work / ".data" / "openrelay").symlink_to(stack.directory / "data")
    out, _ = sh(stack, work, f"{ORL} files upload requests.jsonl", key=False)
    assert json.loads(out)["purpose"] == "batch"
    out, _ = sh(stack, work, f"{ORL} lag", key=False)
    assert {line.split("\t")[0] for line in out.splitlines()} == {"dispatch", "settle", "sink", "meter"}


def test_orl_create_wait_results_with_rejected_records(stack: Stack, work: Path) -> None:
    with (work / "requests.jsonl").open("a") as file:
        file.write("not JSON\n")
        file.write(json.dumps(record("req-1", "again")) + "\n")
        file.write(json.dumps(record("bad", "status:400")) + "\n")
    create = f"{ORL} batches create --input-file requests.jsonl --endpoint {CHAT} --wait"
    out, err = sh(stack, work, create, status=1)
    batch = json.loads(out)
    assert batch["request_counts"] == {"total": 5, "completed": 2, "failed": 3}
    assert "rejected: line 3: " in err
    assert "[invalid_json]" in err
    assert "rejected: line 4 (req-1): " in err
    assert "[duplicate_custom_id]" in err
    assert "failed: bad: " in err
    assert "[HTTP 400]" in err
    out, err = sh(stack, work, f"{ORL} batches results {batch['id']} -o out", status=1)
    assert f"output\tout/{batch['id']}-output.jsonl\t2 lines" in out
    assert f"error\tout/{batch['id']}-error.jsonl\t3 lines" in out
    assert results(work / "out" / f"{batch['id']}-output.jsonl") == ANSWERS


def test_orl_usage_shows_what_the_batch_cost(stack: Stack, work: Path) -> None:
    create = f"{ORL} batches create --input-file requests.jsonl --endpoint {CHAT} --priority expedited --wait"
    batch = json.loads(sh(stack, work, create)[0])
    usage = f"{ORL} usage --batch {batch['id']} --group-by batch,tier --json"
    deadline = time.monotonic() + 60
    while not (rows := json.loads(sh(stack, work, usage)[0])["data"]):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert len(rows) == 1
    assert (rows[0]["requests"], rows[0]["tier"]) == (2, "expedited")
    assert rows[0]["cost_nano_usd"] == batch["usage"]["cost_nano_usd"] == 2 * (600 + 3600)


def start_waiting(stack: Stack, work: Path) -> subprocess.Popen[str]:
    """Start the command and return once it waits for its batch."""
    process = subprocess.Popen(
        ["bash", "-euc", WAIT],
        cwd=work,
        env=environment(stack, work),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    deadline = time.monotonic() + 60
    while "in_progress" not in process.stderr.readline():
        assert process.poll() is None
        assert time.monotonic() < deadline
    return process


def batches(stack: Stack, work: Path) -> set[str]:
    return {each["id"] for each in json.loads(sh(stack, work, f"{ORL} batches list --json")[0])["data"]}


def test_orl_killed_while_it_waits_and_started_again(stack: Stack, work: Path) -> None:
    before = batches(stack, work)
    with start_waiting(stack, work) as first:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    out, err = sh(stack, work, WAIT)
    assert "going on with batch_" in err
    batch = json.loads(out)
    assert batch["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    assert batches(stack, work) - before == {batch["id"]}


def test_the_api_dies_while_orl_waits(stack: Stack, work: Path) -> None:
    with start_waiting(stack, work) as waiting:
        stack.kill("api")
        out, err = waiting.communicate(timeout=120)
    assert waiting.returncode == 0, err
    assert json.loads(out)["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
