"""The broker's jars: which ones, where they lie, and that they are the ones we tested.

`kafka.lock` lists every jar by Maven coordinate and SHA-256. The cache is laid out like a Maven repository;
a jar counts as present only when its hash is the locked one, so a download cut short by a crash, or a file
changed since, is fetched again instead of used. Nothing touches the network once all of them are there.
"""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import platformdirs

LOCK = Path(__file__).with_name("kafka.lock")
WANTED = (
    ("org.apache.kafka", "kafka_2.13", "4.4.0"),
    ("org.apache.kafka", "kafka-tools", "4.4.0"),
    ("org.slf4j", "slf4j-simple", "1.7.36"),
)
"""What the lock is made from; slf4j-simple because Kafka alone would log nothing."""
UNWANTED = ("connect-runtime", "connect-api", "connect-json")
"""Kafka Connect with its web server, half of all jars: the tools ask for it, the broker never loads it."""
FETCH_TIMEOUT_S = 60
PARALLEL = 4


class BrokerMissing(Exception):
    """The jars cannot be had; the message says what to do."""


class Jar(NamedTuple):
    group: str
    artifact: str
    version: str
    sha256: str

    @property
    def path(self) -> Path:
        """Where a Maven repository keeps it."""
        name = f"{self.artifact}-{self.version}.jar"
        return Path(*self.group.split("."), self.artifact, self.version, name)


def cache_dir() -> Path:
    return platformdirs.user_cache_path("openrelay") / "jars"


def locked() -> list[Jar]:
    """The lock, one `group:artifact:version sha256` a line; `#` starts a comment."""
    jars = []
    for line in LOCK.read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            coordinate, sha256 = line.split()
            group, artifact, version = coordinate.split(":")
            jars.append(Jar(group, artifact, version, sha256))
    return jars


def classpath() -> list[Path]:
    """Paths of all jars, fetching those that are missing; raises BrokerMissing."""
    missing = [jar for jar in locked() if not _present(jar)]
    if missing:
        _fetch(missing)
    return [cache_dir() / jar.path for jar in locked()]


def _present(jar: Jar) -> bool:
    path = cache_dir() / jar.path
    return path.is_file() and _sha256(path) == jar.sha256


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch(jars: list[Jar]) -> None:
    with _alone(), ThreadPoolExecutor(PARALLEL) as workers:
        for _ in workers.map(_fetch_one, jars):
            pass


@contextmanager
def _alone() -> Iterator[None]:
    """One fetching process at a time; the next one finds the work done."""
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        lock = (cache_dir() / ".lock").open("w")
    except OSError as error:
        raise BrokerMissing(f"cannot write the broker's cache {cache_dir()}: {error.strerror}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch_one(jar: Jar) -> None:
    if _present(jar):
        return
    from jgo.maven import MavenContext  # the one user of it; every other start does without

    path = cache_dir() / jar.path
    path.unlink(missing_ok=True)
    maven = MavenContext(repo_cache=cache_dir(), local_repos=[], timeout=FETCH_TIMEOUT_S)
    try:
        maven.project(jar.group, jar.artifact).at_version(jar.version).artifact().resolve()
    except (OSError, RuntimeError) as error:
        raise BrokerMissing(
            f"could not download {jar.artifact} {jar.version} for the embedded broker ({error}); "
            "run again with a network connection, or name a cluster in [kafka]"
        ) from error
    if not _present(jar):
        raise BrokerMissing(f"{path} is not the file named in {LOCK.name}; delete it and run again")


def relock() -> str:
    """The text of a new lock: what Maven resolves today for `WANTED`. Fetches every jar."""
    from jgo.maven import Dependency, MavenContext

    maven = MavenContext(repo_cache=cache_dir(), local_repos=[], timeout=FETCH_TIMEOUT_S)
    unwanted = [maven.project("org.apache.kafka", name) for name in UNWANTED]
    wanted = [
        Dependency(maven.project(group, name).at_version(version).artifact(), exclusions=unwanted)
        for group, name, version in WANTED
    ]
    resolved, below = maven.resolver.resolve(wanted)
    lines = sorted(
        f"{a.groupId}:{a.artifactId}:{a.version} {_sha256(a.resolve())}"
        for a in (dependency.artifact for dependency in resolved + below)
    )
    return "# Made by services.embedded.jars.relock.\n" + "\n".join(lines) + "\n"
