"""Settings for tests, built directly: no file, no environment."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from schemas.settings import (
    ClickHouse,
    Egress,
    Kafka,
    Limits,
    Model,
    Organization,
    Pool,
    Secrets,
    Settings,
    Storage,
)

MODEL = "openrelay/test"
ORGANIZATION = "org_test"
API_KEY = "or_test_key_0123456789"
SECRET = base64.b64encode(bytes(range(32))).decode()


def settings_for(
    directory: Path,
    *,
    bootstrap: str,
    warehouse_url: str = "http://127.0.0.1:1",
    pool_url: str = "http://127.0.0.1:1/v1",
    partitions: int = 4,
    limits: Limits | None = None,
    **fields: Any,
) -> Settings:
    """One organization with every feature, one model with one pool; `fields` replace any part of the tree.

    A server that is not given is an address where nothing listens.
    """
    parts: dict[str, Any] = {
        "data_dir": str(directory),
        "kafka": Kafka(bootstrap=bootstrap, partitions=partitions, request_partitions=partitions),
        "clickhouse": ClickHouse(url=warehouse_url),
        "storage": Storage(url=(directory / "blobs").as_uri()),
        "secrets": Secrets(keys=(SECRET,)),
        "limits": limits or Limits(),
        "egress": Egress(allow_cidrs=("127.0.0.0/8",), allow_http=True),
        "organizations": (
            Organization(id=ORGANIZATION, features=("batch", "workflows"), api_keys=(API_KEY,)),
        ),
        "models": {
            MODEL: Model(
                input_nano_usd_per_mtok=150_000_000,
                cached_input_nano_usd_per_mtok=75_000_000,
                output_nano_usd_per_mtok=600_000_000,
                pools=(Pool(base_url=pool_url),),
            )
        },
    }
    return Settings(**(parts | fields))
