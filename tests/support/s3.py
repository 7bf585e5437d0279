"""An S3 server over real HTTP, for tests."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from schemas.settings import Storage

_SERVER = """
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
print(f"http://{host}:{port}", flush=True)
server._thread.join()
"""


@contextmanager
def s3_server() -> Iterator[str]:
    """The endpoint of a running server."""
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert server.stdout is not None
    try:
        yield server.stdout.readline().strip()
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def new_bucket(endpoint: str) -> Storage:
    """Storage settings for a bucket that did not exist before."""
    bucket = f"bucket-{time.monotonic_ns()}"
    httpx.put(
        f"{endpoint}/{bucket}", headers={"host": "s3.amazonaws.com"}, trust_env=False
    ).raise_for_status()
    options = {
        "endpoint": endpoint,
        "region": "us-east-1",
        "access_key_id": "x",
        "secret_access_key": "y",
        "allow_http": "true",
    }
    return Storage(url=f"s3://{bucket}/some/prefix", options=options)
