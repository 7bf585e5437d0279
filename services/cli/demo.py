"""The demonstration behind `make demo`: a whole stack, one batch from upload to bill, and everything stopped.

It works in `demo-output/` of the current directory: the input, the settings, the results, and the stack's
data, which the next run replaces. It exits 0 only if every record is where it belongs and the bill is the
same to the nano-dollar in the batch object, in the lines of the output file and in ClickHouse.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import tomli_w
from rich.console import Console
from rich.table import Table

from schemas.batches import Batch
from schemas.facts import Priority
from schemas.settings import Model
from services.cli import demo_tools
from services.cli.client import Trouble
from services.cli.demo_bill import of_batch, of_file, of_warehouse
from services.cli.demo_input import ENDPOINT, write_input
from services.cli.outcome import read_batch
from services.cli.output import money
from services.embedded.ports import free_port
from services.process import dies_with, spawn
from streams.core.pricing import price

MODEL = "openrelay/gpt-oss-120b"
PRICES = {
    "input_nano_usd_per_mtok": 150_000_000,
    "cached_input_nano_usd_per_mtok": 75_000_000,
    "output_nano_usd_per_mtok": 600_000_000,
}
LATENCY_MS = 400
SLOTS = 32
START_S = 180.0
STOP_S = 60.0
_MARK = ".openrelay-demo"

console = Console(highlight=False, markup=False, soft_wrap=True)


class DemoFailed(Exception):
    """The demonstration did not show what it should; the message says what happened instead."""


def main() -> None:
    signal.signal(signal.SIGTERM, _stop)
    try:
        agreed = run(Path("demo-output"))
    except (DemoFailed, Trouble) as failure:
        print(f"demo: {failure}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0 if agreed else 1)


def run(directory: Path) -> bool:
    """The whole of it; whether the three bills agree. Raises DemoFailed, Trouble."""
    _prepare(directory)
    good, broken = write_input(directory / "requests.jsonl", MODEL)
    print(f"{directory / 'requests.jsonl'} asks about {good} modules of Python's standard library; one")
    print(f"more record will fail at the model, and {len(broken)} are broken on purpose.\n")
    with _simulator(directory) as base_url, _stack(directory, base_url) as connection:
        batch = _batch(directory, connection)
        _results(directory, connection, batch)
        _check_counts(batch, good, len(broken))
        agreed = _bills(directory, connection, batch)
        _tools(directory, connection)
    console.print(f"Input, results, settings and logs are in {directory.resolve()}.")
    return agreed


def _tools(directory: Path, connection: dict[str, Any]) -> None:
    """A second batch, through the servers of the examples."""
    with demo_tools.servers(directory) as ports:
        if not ports:
            return
        file = directory / "tools.jsonl"
        count = demo_tools.write_input(file, MODEL, ports)
        print(f"\nA second batch: {file} calls tools over HTTP and MCP between turns, and runs a workflow.")
        words = ["batches", "create", "--input-file", str(file), "--endpoint", ENDPOINT, "--wait", "--yes"]
        batch = read_batch(json.loads(_orl(connection, words).stdout or b"{}"))
        _orl(connection, ["batches", "results", batch.id, "-o", str(directory)])
    if batch.request_counts.completed != count:
        raise DemoFailed(f"{batch.id} ended {batch.status} with {batch.request_counts}")
    for line in (directory / f"{batch.id}-output.jsonl").read_bytes().splitlines():
        answer = json.loads(line)
        console.print(f"  {answer['custom_id']}: {demo_tools.told(answer)}")


def _prepare(directory: Path) -> None:
    """An empty directory, made by an earlier run or by this one."""
    if directory.exists():
        if not (directory / _MARK).exists():
            raise DemoFailed(f"{directory} exists and is not from an earlier demonstration: move it away.")
        shutil.rmtree(directory)
    directory.mkdir()
    (directory / _MARK).touch()


@contextmanager
def _simulator(directory: Path) -> Iterator[str]:
    """A model server with latency, so that there is something to watch; its base URL."""
    port = free_port()
    print("The model is simulated: it answers with the first words of what it was asked.")
    words = ["simulate", "--port", str(port), "--models", MODEL, "--concurrency", str(SLOTS)]
    words += ["--latency-ms", str(LATENCY_MS), "--latency-sigma", "0.5"]
    with _process(words, directory / "simulator.log"):
        yield f"http://127.0.0.1:{port}/v1"


@contextmanager
def _stack(directory: Path, model_url: str) -> Iterator[dict[str, Any]]:
    """`openrelay up` on a directory and ports of its own; what its connection.json says."""
    model = PRICES | {"pools": [{"base_url": model_url, "max_concurrency": SLOTS}]}
    settings = directory / "openrelay.toml"
    # The examples' servers are on this machine, which customers' tools otherwise never reach.
    egress = {"allow_cidrs": ["127.0.0.0/8"], "allow_http": True}
    settings.write_text(tomli_w.dumps({"models": {MODEL: model}, "egress": egress}), encoding="utf-8")
    data = directory / "data"
    words = ["up", "--config", str(settings), "--data", str(data), "--port", "0", "--control-port", "0"]
    print(f"Starting the stack in {data} (broker, warehouse, API and every stage).", flush=True)
    log = directory / "up.log"
    started_s = time.monotonic()
    with _process(words, log) as up:
        while not (data / "connection.json").exists():
            if up.poll() is not None or time.monotonic() - started_s > START_S:
                tail = "\n".join(log.read_text("utf-8", "replace").splitlines()[-20:])
                raise DemoFailed(f"the stack did not start; the end of {log}:\n{tail}")
            time.sleep(0.05)
        print(f"It was ready after {time.monotonic() - started_s:.0f} s.\n", flush=True)
        yield json.loads((data / "connection.json").read_text("utf-8"))
        print("\nStopping everything.", flush=True)


@contextmanager
def _process(words: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """One of our commands in the background, stopped at the end."""
    command = [sys.executable, "-P", "-m", "services.cli.openrelay", *words]
    process, _ = spawn(command, log=log, environ=_environment(), ready=False)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _batch(directory: Path, connection: dict[str, Any]) -> Batch:
    """Upload, create, wait: with the command that customers use."""
    file = str(directory / "requests.jsonl")
    words = ["batches", "create", "--input-file", file, "--endpoint", ENDPOINT, "--wait"]
    done = _orl(connection, words)
    if not done.stdout:
        raise DemoFailed(f"`orl batches create` ended with {done.returncode}")
    return read_batch(json.loads(done.stdout))


def _results(directory: Path, connection: dict[str, Any], batch: Batch) -> None:
    done = _orl(connection, ["batches", "results", batch.id, "-o", str(directory)])
    print(done.stdout.decode())
    if batch.output_file_id is None:
        raise DemoFailed("no record was completed")
    print("The first results:")
    with (directory / f"{batch.id}-output.jsonl").open("rb") as file:
        for _, line in zip(range(3), file, strict=False):
            answer = json.loads(line)
            content = answer["response"]["body"]["choices"][0]["message"]["content"]
            console.print(f"  {answer['custom_id']}: {content}")


def _orl(connection: dict[str, Any], words: list[str]) -> subprocess.CompletedProcess[bytes]:
    """Run `orl` against the stack; it talks to the terminal itself, and its results come back."""
    print(f"$ orl {' '.join(words)}", flush=True)
    variables = {
        "OPENRELAY_API_KEY": connection["api_key"],
        "OPENRELAY_BASE_URL": connection["base_url"],
    }
    command = [sys.executable, "-P", "-m", "services.cli.orl", *words]
    return subprocess.run(
        command,
        env=_environment() | variables,
        stdout=subprocess.PIPE,
        check=False,
        preexec_fn=dies_with(os.getpid()),
    )


def _check_counts(batch: Batch, good: int, broken: int) -> None:
    counts = batch.request_counts
    expected = (good + 1 + broken, good, 1 + broken)
    if batch.status != "completed" or (counts.total, counts.completed, counts.failed) != expected:
        raise DemoFailed(f"{batch.id} ended {batch.status} with {counts}, where {expected} was expected")


def _bills(directory: Path, connection: dict[str, Any], batch: Batch) -> bool:
    """Show the three bills side by side; whether they are the same."""
    ours = of_batch(batch)
    agreed_price = price(MODEL, msgspec.convert(PRICES, Model), Priority.STANDARD)
    bills = {
        "batch object": ours,
        "output file": of_file(directory / f"{batch.id}-output.jsonl", agreed_price),
        "ClickHouse": of_warehouse(connection["clickhouse_url"], batch.id, ours.requests),
    }
    table = Table("as in", "requests", "input", "cached", "output", "nano-USD", "USD", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, bill in bills.items():
        table.add_row(name, *(f"{number:,}" for number in bill), money(bill.cost_nano_usd))
    print("\nUsage and cost; for the output file, tokens times price are added up line by line:")
    console.print(table)
    agreed = len(set(bills.values())) == 1
    console.print("\nAll three agree." if agreed else "\nThey DIFFER.")
    return agreed


def _environment() -> dict[str, str]:
    """Ours, without settings of another stack."""
    return {name: value for name, value in os.environ.items() if not name.startswith("OPENRELAY_")}


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
