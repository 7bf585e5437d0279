"""Two S3 servers over real HTTP, for tests: moto, and SeaweedFS, which is one to store data in."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from schemas.settings import Storage
from services.embedded.ports import free_port

START_S = 60.0
KEY_ID, SECRET_KEY, REGION = "test-key-id", "test-secret-key", "us-east-1"
_MOTO = """
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
print(f"http://{host}:{port}", flush=True)
server._thread.join()
"""
_WEED = (
    str(Path(sys.executable).with_name("weed")),
    "-logtostderr",
    "server",
    "-ip=127.0.0.1",
    "-ip.bind=127.0.0.1",
    "-master.volumeSizeLimitMB=1024",
    "-volume.max=100",
    "-filer",
    "-s3",
    "-s3.iam=false",
    "-s3.port.iceberg=0",
    "-s3.port.lance=0",
    "-s3.autoCreateBucket=false",
)
_WEED_PORTS = ("master", "volume", "filer", "s3")


@contextmanager
def s3_server() -> Iterator[str]:
    """The endpoint of a running server that believes everybody."""
    server = subprocess.Popen(
        [sys.executable, "-c", _MOTO], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert server.stdout is not None
    try:
        yield server.stdout.readline().strip()
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


@contextmanager
def strict_s3_server(directory: Path) -> Iterator[str]:
    """The endpoint of a running server that checks signatures, with all headers signed, and their time."""
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "s3.json"
    credentials = [{"accessKey": KEY_ID, "secretKey": SECRET_KEY}]
    config.write_text(
        json.dumps({"identities": [{"name": "test", "credentials": credentials, "actions": ["Admin"]}]})
    )
    ports: dict[str, int] = {}
    for name in (f"{each}.port{kind}" for each in _WEED_PORTS for kind in ("", ".grpc")):
        while (port := free_port()) in ports.values():
            pass
        ports[name] = port
    command = [*_WEED, f"-dir={directory}", f"-s3.config={config}"]
    command += [f"-{name}={port}" for name, port in ports.items()]
    endpoint = f"http://127.0.0.1:{ports['s3.port']}"
    log = directory / "weed.log"
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + START_S
        while not _takes_objects(endpoint):
            if server.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"SeaweedFS did not start:\n{log.read_text('utf-8')[-8000:]}")
            time.sleep(0.05)
        yield endpoint
    finally:
        server.kill()
        server.wait()


def new_bucket(endpoint: str) -> Storage:
    """Storage settings for a bucket that did not exist before."""
    bucket = f"bucket-{time.monotonic_ns()}"
    with contextlib.closing(client(endpoint)) as someone:
        someone.create_bucket(Bucket=bucket)
    options = {
        "endpoint": endpoint,
        "region": REGION,
        "access_key_id": KEY_ID,
        "secret_access_key": SECRET_KEY,
        "allow_http": "true",
    }
    return Storage(url=f"s3://{bucket}/some/prefix", options=options)


def client(endpoint: str) -> Any:
    """A client of somebody else's make."""
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name=REGION,
        aws_access_key_id=KEY_ID,
        aws_secret_access_key=SECRET_KEY,
        config=Config(retries={"total_max_attempts": 1}),
    )


def _takes_objects(endpoint: str) -> bool:
    """Whether all parts of a server have found each other; it answers before."""
    with contextlib.closing(client(endpoint)) as someone:
        try:
            with contextlib.suppress(ClientError):  # may be there since the last look
                someone.create_bucket(Bucket="ready")
            someone.put_object(Bucket="ready", Key="ready", Body=b"x")
        except (BotoCoreError, ClientError):
            return False
    return True
