"""What every blob store promises, on a local directory and on S3 over real HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from schemas.settings import Storage
from streams.blobs import BlobMissing, Blobs, open_blobs
from streams.blobs.local import LocalBlobs
from streams.blobs.stores import lifecycle_rule
from tests.support.s3 import new_bucket, s3_server, strict_s3_server


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def strict_s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with strict_s3_server(tmp_path_factory.mktemp("s3")) as endpoint:
        yield endpoint


@pytest.fixture(params=["local", "s3_endpoint", "strict_s3_endpoint"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    if request.param == "local":
        return open_blobs(Storage(url=f"file://{tmp_path}/blobs"))
    return open_blobs(new_bucket(request.getfixturevalue(request.param)))


def test_the_rule_for_cut_off_uploads_is_one_that_s3_takes(s3_endpoint: str) -> None:
    storage = new_bucket(s3_endpoint)
    bucket = storage.url.split("/")[2]
    rule = lifecycle_rule(storage)
    assert rule is not None
    client = boto3.client(
        "s3",
        endpoint_url=s3_endpoint,
        region_name="us-east-1",
        aws_access_key_id="x",
        aws_secret_access_key="y",
    )
    client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=json.loads(rule))
    (kept,) = client.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]
    assert kept["Filter"] == {"Prefix": "some/prefix/"}
    assert kept["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 1}


def test_only_buckets_with_parts_of_their_own_need_a_rule() -> None:
    assert lifecycle_rule(Storage(url="file:///tmp/x")) is None
    assert lifecycle_rule(Storage(url="az://container/prefix")) is None
    assert "matchesPrefix" not in (lifecycle_rule(Storage(url="gs://bucket")) or "matchesPrefix")


def test_put_read_size_exists(blobs: Blobs) -> None:
    blobs.put("uploads/file-1", b"hello")
    assert blobs.read("uploads/file-1") == b"hello"
    assert blobs.size("uploads/file-1") == 5
    assert blobs.exists("uploads/file-1")
    blobs.put("uploads/empty", b"")
    assert blobs.read("uploads/empty") == b""
    assert blobs.size("uploads/empty") == 0


def test_missing_objects(blobs: Blobs) -> None:
    for read in (
        lambda: blobs.read("a/none"),
        lambda: blobs.size("a/none"),
        lambda: blobs.read_range("a/none", 0, 1),
        lambda: blobs.stream("a/none"),
        lambda: blobs.copy("a/none", "a/other"),
    ):
        with pytest.raises(BlobMissing):
            read()
    assert not blobs.exists("a/none")
    assert not blobs.exists("a/other")
    blobs.delete("a/none")
    assert blobs.list("a/") == []


def test_ranges(blobs: Blobs) -> None:
    blobs.put("a", bytes(range(100)))
    assert blobs.read_range("a", 0, 3) == bytes([0, 1, 2])
    assert blobs.read_range("a", 98, 10) == bytes([98, 99])
    assert blobs.read_range("a", 100, 10) == b""
    assert blobs.read_range("a", 5, 0) == b""
    assert b"".join(blobs.stream("a", chunk=7)) == bytes(range(100))
    assert b"".join(blobs.stream("a", chunk=7, offset=90)) == bytes(range(90, 100))
    assert b"".join(blobs.stream("a", chunk=7, offset=10, length=20)) == bytes(range(10, 30))
    assert b"".join(blobs.stream("a", offset=100)) == b""
    assert b"".join(blobs.stream("a", offset=99, length=50)) == bytes([99])


def test_writer_shows_nothing_before_commit(blobs: Blobs) -> None:
    with blobs.writer("w/one") as writer:
        writer.write(b"half")
        assert not blobs.exists("w/one")
        assert blobs.list("") == []
        writer.write(b"whole")
        assert writer.commit() == 9
        assert blobs.read("w/one") == b"halfwhole"
    assert blobs.read("w/one") == b"halfwhole"


def test_writer_abandoned(blobs: Blobs) -> None:
    with blobs.writer("w/left") as writer:
        writer.write(b"x")

    def fail() -> None:
        with blobs.writer("w/raised") as writer:
            writer.write(b"x")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert blobs.list("") == []


def test_large_object_in_parts(blobs: Blobs) -> None:
    piece = bytes(range(256)) * 4096
    with blobs.writer("large") as writer:
        for _ in range(12):
            writer.write(piece)
        assert writer.commit() == 12 * len(piece)
    assert blobs.size("large") == 12 * len(piece)
    assert b"".join(blobs.stream("large")) == piece * 12
    assert blobs.read_range("large", len(piece) - 1, 3) == bytes([255, 0, 1])


def test_replace_and_copy(blobs: Blobs) -> None:
    blobs.put("a/source", b"one")
    blobs.copy("a/source", "b/target")
    blobs.copy("a/source", "b/target")
    assert blobs.read("b/target") == b"one"
    blobs.put("a/source", b"two")
    assert blobs.read("b/target") == b"one"
    blobs.copy("a/source", "b/target")
    assert blobs.read("b/target") == b"two"
    blobs.delete("a/source")
    assert blobs.read("b/target") == b"two"
    assert blobs.list("") == ["b/target"]


def test_a_read_under_way_survives_deletion(blobs: Blobs) -> None:
    blobs.put("a", b"x" * 3_000_000)
    pieces = blobs.stream("a", chunk=100_000)
    first = next(pieces)
    blobs.delete("a")
    assert not blobs.exists("a")
    assert first + b"".join(pieces) == b"x" * 3_000_000


def test_list_by_prefix(blobs: Blobs) -> None:
    for name in ("b/2/x", "b/2/y", "b/20/z", "c"):
        blobs.put(name, b".")
    assert blobs.list("b/2") == ["b/2/x", "b/2/y", "b/20/z"]
    assert blobs.list("b/2/") == ["b/2/x", "b/2/y"]
    assert blobs.list("b/2/x") == ["b/2/x"]
    assert blobs.list("") == ["b/2/x", "b/2/y", "b/20/z", "c"]
    assert blobs.list("none/") == []


def test_writers_at_once(blobs: Blobs) -> None:
    def write(each: int) -> None:
        with blobs.writer("same") as writer:
            for _ in range(50):
                writer.write(bytes([each]) * 1000)
            writer.commit()

    threads = [threading.Thread(target=write, args=(each,)) for each in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    content = blobs.read("same")
    assert len(content) == 50_000
    assert len(set(content)) == 1


@pytest.mark.parametrize("name", ["../x", "/x", "a/../b", "a//b", "", ".tmp/x", "a/.x", "a\0b", "a\nb"])
def test_local_names_stay_inside(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not an object name"):
        LocalBlobs(str(tmp_path / "blobs")).put(name, b"x")


def test_local_leftovers_of_dead_writers_are_removed(tmp_path: Path) -> None:
    root = tmp_path / "blobs"
    alive = LocalBlobs(str(root))
    code = (
        "import sys, os, signal; from streams.blobs.local import LocalBlobs\n"
        "c = LocalBlobs(sys.argv[1]).writer('a'); c.__enter__().write(b'x' * 100000)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    with alive.writer("b") as writer:
        writer.write(b"y")
        assert subprocess.run([sys.executable, "-c", code, str(root)], check=False).returncode == -9
        assert len(list((root / ".tmp").iterdir())) == 2
        again = LocalBlobs(str(root))
        assert len(list((root / ".tmp").iterdir())) == 1
        writer.commit()
    assert again.list("") == ["b"]
    assert list((root / ".tmp").iterdir()) == []


def test_local_copy_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = LocalBlobs(str(tmp_path / "blobs"))
    blobs.put("a", b"one")

    def refuse(*_: object) -> None:
        raise OSError(1, "not permitted")

    monkeypatch.setattr("streams.blobs.local.os.link", refuse)
    blobs.copy("a", "b")
    assert blobs.read("b") == b"one"


def test_unknown_store() -> None:
    with pytest.raises(ValueError, match="none of file, s3, gs, az"):
        open_blobs(Storage(url="ftp://x"))
