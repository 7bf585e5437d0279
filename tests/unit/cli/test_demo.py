"""What the demonstration asks, and how it adds up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from schemas.money import Price
from services.cli.demo import DemoFailed, _prepare
from services.cli.demo_bill import Bill, of_file
from services.cli.demo_input import docstrings, write_input
from services.embedded.ports import free_port
from tests.support.until import until


def test_the_input_has_hundreds_of_records_and_some_broken_ones(tmp_path: Path) -> None:
    good, broken = write_input(tmp_path / "requests.jsonl", "m")
    lines = (tmp_path / "requests.jsonl").read_text("utf-8").splitlines()
    assert good >= 200
    assert len(lines) == good + 1 + len(broken)
    assert len({each.code for each in broken}) == len(broken) >= 5
    assert lines[0] not in [each.line for each in broken]
    assert all(lines.count(each.line) == 1 for each in broken)


def test_docstrings_are_read_without_importing_anything() -> None:
    found = dict(docstrings())
    assert found["json"].startswith("JSON (JavaScript Object Notation)")
    assert "antigravity" not in found  # has no docstring, and would open a browser
    assert not any(part.startswith("_") for name in found for part in name.split("."))


def test_the_file_is_added_up_record_by_record(tmp_path: Path) -> None:
    def line(prompt: int, completion: int, **details: int) -> str:
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}
        return json.dumps({"custom_id": "a", "response": {"body": {"usage": usage}}})

    path = tmp_path / "output.jsonl"
    path.write_text("\n".join([line(1, 1), line(1, 1), line(10, 0, cached_tokens=4)]) + "\n")
    price = Price("p", 1_000_000, 500_000, 3_000_000, 5_000)
    # 0.5 and 1.5 a record round to 1 and 2; 3 fresh and 1 cached in the last.
    assert of_file(path, price) == Bill(3, 12, 4, 2, (1 + 2) * 2 + 3 + 1)


def test_a_demonstration_that_is_killed_takes_its_command_along(tmp_path: Path) -> None:
    connection = {"api_key": "or_0123456789abcdef", "base_url": f"http://127.0.0.1:{free_port()}/v1"}
    program = f"from services.cli import demo; demo._orl({connection}, ['batches', 'list'])"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": os.getcwd(), "HOME": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as demo:
        assert demo.stderr is not None
        assert b"trying again" in demo.stderr.readline()
        [orl] = psutil.Process(demo.pid).children()
        demo.kill()
        demo.wait()
        until(
            lambda: not orl.is_running() or orl.status() == psutil.STATUS_ZOMBIE, 5, "orl outlives the demo"
        )


def test_a_directory_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(DemoFailed, match="not from an earlier demonstration"):
        _prepare(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").exists()
    for _ in range(2):
        _prepare(tmp_path / "demo-output")
        assert [path.name for path in (tmp_path / "demo-output").iterdir()] == [".openrelay-demo"]
