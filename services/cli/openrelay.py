"""`openrelay`, the operator's command: start a stack or one role of it, check settings, prepare a cluster.

Every role is a process of its own and says on its ready pipe that it serves. What a role needs is imported
when it is started, so that no process carries the libraries of another.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, NoReturn

from cyclopts import App, Parameter

from schemas.settings import Settings
from services import process
from services.operator import commands
from services.settings import SettingsError, default_data_dir, load, read_tree
from streams import crashpoints

app = App(
    name="openrelay",
    help="Run the Batch API: everything on one machine, or one role of a cluster.",
    version=lambda: version("openrelay-batch"),
)

Config = Annotated[
    Path | None, Parameter(help="Settings file, TOML or JSON; OPENRELAY_ variables override it.")
]
Slot = Annotated[int, Parameter(help="Static member id; every process of a role needs its own, from 0.")]
Host = Annotated[str, Parameter(help="Address to listen on.")]


@app.command
def up(
    *,
    config: Config = None,
    data: Annotated[Path | None, Parameter(help="Directory for everything that is kept.")] = None,
    port: Annotated[int, Parameter(help="Port of the inference host; 0 for any.")] = 8000,
    control_port: Annotated[int, Parameter(help="Port of the control host; 0 for any.")] = 8001,
    dispatchers: Annotated[int, Parameter(help="Dispatcher processes.")] = 1,
) -> None:
    """Start everything on this machine, bound to 127.0.0.1, until interrupted."""
    from services.embedded.supervisor import run

    run(config, data, port=port, control_port=control_port, dispatchers=dispatchers)


@app.command
def api(*, config: Config = None, host: Host = "127.0.0.1", port: int = 8000) -> None:
    """Serve files and batches."""
    settings = _start("api", config)
    from services.api.serve import run

    run(settings, host, port)


@app.command
def control(*, config: Config = None, host: Host = "127.0.0.1", port: int = 8001) -> None:
    """Serve usage, lag, metrics and keys."""
    settings = _start("control", config)
    from services.control.serve import run

    run(settings, host, port)


@app.command
def dispatch(*, config: Config = None, slot: Slot = 0) -> None:
    """Run records on the model servers."""
    settings = _start(_numbered("dispatch", slot), config)
    from services.roles import dispatch as run

    run(settings, slot, lambda: load(config))


@app.command
def settle(*, config: Config = None, slot: Slot = 0) -> None:
    """Give each record its one verdict."""
    settings = _start(_numbered("settle", slot), config)
    from services.roles import settle as run

    run(settings, slot)


@app.command
def sink(*, config: Config = None, slot: Slot = 0) -> None:
    """Write the result files."""
    settings = _start(_numbered("sink", slot), config)
    from services.roles import sink as run

    run(settings, slot)


@app.command
def meter(*, config: Config = None, slot: Slot = 0) -> None:
    """Carry usage to ClickHouse."""
    settings = _start(_numbered("meter", slot), config)
    from services.roles import meter as run

    run(settings, slot)


@app.command
def warehouse(
    *,
    data: Annotated[Path | None, Parameter(help="Directory of the database.")] = None,
    host: Host = "127.0.0.1",
    port: int = 8123,
) -> None:
    """Serve ClickHouse's HTTP interface from the engine in this process."""
    process.configure_log("warehouse")
    from services.warehouse.serve import run

    run(data or default_data_dir() / "warehouse", host, port)


@app.command
def simulate(
    *,
    host: Host = "127.0.0.1",
    port: int = 8002,
    latency_ms: Annotated[float, Parameter(help="Median time of a call.")] = 0.0,
    latency_sigma: Annotated[float, Parameter(help="Spread of the times; 0: all alike.")] = 0.0,
    concurrency: Annotated[int, Parameter(help="Calls at once; more of them wait.")] = 256,
    models: Annotated[list[str] | None, Parameter(help="Names to serve; default: any.")] = None,
    call_log: Annotated[Path | None, Parameter(help="File that gets a JSON line for each call.")] = None,
) -> None:
    """Serve a simulated model over the OpenAI protocol."""
    process.configure_log("simulator")
    from services.simulator.serve import run

    run(
        host,
        port,
        latency_ms=latency_ms,
        latency_sigma=latency_sigma,
        concurrency=concurrency,
        models=models,
        call_log=call_log,
        ready=process.signal_ready,
    )


@app.command
def check(file: Config = None, /, *, config: Config = None) -> None:
    """Validate the settings and exit; every fault is shown at once.

    What `openrelay up` would bring itself may be missing. The file may be named with --config or without.
    """
    from services.embedded.resolve import PLACEHOLDERS, Ports, resolve
    from streams.blobs.stores import lifecycle_rule

    if file is not None and config is not None:
        _fail("openrelay check: give one file", 2)
    config = config or file
    try:
        tree = read_tree(config, os.environ)
        directory = Path(str(tree.get("data_dir") or default_data_dir()))
        resolved = resolve(tree, directory, Ports(*range(1, 7)), PLACEHOLDERS)
    except SettingsError as error:
        _fail(str(error), 2)
    names = {"broker": resolved.kafka, "warehouse": resolved.warehouse, "simulator": bool(resolved.simulated)}
    brought = [name for name, needed in names.items() if needed]
    print(
        "the settings are good"
        + (f"; only `openrelay up` brings the {', '.join(brought)}" if brought else "")
    )
    if (rule := lifecycle_rule(resolved.settings.storage)) is not None:
        print(f"the bucket needs a rule that drops the parts of uploads cut off by a kill:\n{rule}")


@app.command
def migrate(*, config: Config = None) -> None:
    """Create what is missing: Kafka topics, and the tables and views of the warehouse."""
    settings = _start("migrate", config)
    from clickhouse_connect.driver.exceptions import ClickHouseError

    from services.prepare import prepare
    from services.warehouse.migrate import MigrationError
    from streams.kafka.messages import KafkaFailed

    try:
        for line in prepare(settings):
            print(line)
    except KafkaFailed as error:
        _fail(f"Kafka at {settings.kafka.bootstrap}: {error}", 1)
    except (ClickHouseError, MigrationError) as error:
        _fail(f"ClickHouse: {error}", 1)


@app.command(show=False)
def fetch_broker() -> None:
    """Download the embedded broker's jars, so that later starts need no network."""
    from services.embedded.jars import BrokerMissing, classpath

    try:
        print(f"embedded broker: {len(classpath())} jars in place")
    except BrokerMissing as error:
        _fail(str(error), 1)


commands.add_to(app)


def _numbered(role: str, slot: int) -> str:
    return role if slot == 0 else f"{role}-{slot + 1}"


def _start(role: str, config: Path | None) -> Settings:
    process.configure_log(role)
    if point := os.environ.get("OPENRELAY_CRASH_AT"):
        crashpoints.arm(point)
    settings = _settings(config)
    from services import exposition

    exposition.serve(settings, role)
    return settings


def _settings(config: Path | None) -> Settings:
    try:
        return load(config)
    except SettingsError as error:
        _fail(str(error), 2)


def _fail(message: str, status: int) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(status)


def main() -> None:
    """Run a command; what the operator can put right is said in a line, everything else with its trace."""
    for word in sys.argv[1:]:
        try:
            word.encode()
        except UnicodeEncodeError:
            _fail(f"the argument {word!r} is not UTF-8", 2)
    try:
        app()
    except process.CannotStart as error:
        _fail(str(error), 1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left unwritten goes nowhere


if __name__ == "__main__":
    main()
