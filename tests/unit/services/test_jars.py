"""The broker's jars are the locked ones, fetched once."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from services.embedded import jars
from services.embedded.jars import BrokerMissing, classpath, locked

CONTENT = b"a jar"
PATH = Path("org/example/thing/1.0/thing-1.0.jar")


class Repository:
    """Stands for the Maven client: puts `content` where the real one would, and counts."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.content = CONTENT
        self.fetched = 0
        self.error: Exception | None = None

    def resolve(self) -> Path:
        if self.error is not None:
            raise self.error
        self.fetched += 1
        path = self.cache / PATH
        assert not path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.content)
        return path

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    lock = tmp_path / "kafka.lock"
    lock.write_text(f"# comment\norg.example:thing:1.0 {hashlib.sha256(CONTENT).hexdigest()}\n")
    monkeypatch.setattr(jars, "LOCK", lock)
    monkeypatch.setattr(jars, "cache_dir", lambda: tmp_path / "jars")
    fake = Repository(tmp_path / "jars")
    module = ModuleType("jgo.maven")
    module.MavenContext = lambda **_: fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jgo.maven", module)
    return fake


def test_fetched_once_and_then_never_again(repository: Repository) -> None:
    assert classpath() == [repository.cache / PATH]
    assert classpath() == [repository.cache / PATH]
    assert repository.fetched == 1


def test_a_file_cut_short_or_changed_is_fetched_again(repository: Repository) -> None:
    classpath()
    (repository.cache / PATH).write_bytes(CONTENT[:2])
    classpath()
    assert (repository.cache / PATH).read_bytes() == CONTENT
    assert repository.fetched == 2


def test_another_file_than_the_locked_one_is_refused(repository: Repository) -> None:
    repository.content = b"another jar"
    with pytest.raises(BrokerMissing, match=r"thing-1\.0\.jar is not the file named in kafka\.lock"):
        classpath()


def test_without_a_network_the_message_says_what_to_do(repository: Repository) -> None:
    repository.error = ConnectionError("no route")
    with pytest.raises(BrokerMissing, match=r"thing 1\.0 .*network connection.*\[kafka\]"):
        classpath()


def test_an_unwritable_cache_is_named(repository: Repository, tmp_path: Path) -> None:
    (tmp_path / "jars").write_text("in the way")
    with pytest.raises(BrokerMissing, match="jars"):
        classpath()


def test_the_lock_that_is_committed() -> None:
    found = locked()
    assert {(jar.group, jar.artifact, jar.version) for jar in found} >= set(jars.WANTED)
    assert all(len(jar.sha256) == 64 for jar in found)
    assert len({jar.path for jar in found}) == len(found)
    assert not {jar.artifact for jar in found} & set(jars.UNWANTED)
