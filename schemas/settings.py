"""The settings tree. Decoded once from TOML and `OPENRELAY_` variables; see `services.settings`."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

import msgspec


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table people write by hand: a key we do not know is a typo."""


class Kafka(Strict, frozen=True, kw_only=True):
    bootstrap: str
    """`host:port[,host:port]` of the cluster."""
    replication_factor: int = 1
    """Copies of every partition; 3 on a cluster, with min.insync.replicas 2."""
    partitions: int = 8
    """Partitions of the topics that follow a batch (results, outputs, errors, usage, batches)."""
    request_partitions: int = 8
    """Partitions of each model's request topic: at most this many dispatchers share a model."""


class ClickHouse(Strict, frozen=True, kw_only=True):
    url: str
    """`http://[user[:password]@]host:port`."""


class Storage(Strict, frozen=True, kw_only=True):
    url: str
    """`file:///dir`, `s3://bucket/prefix`, `gs://…` or `az://…`."""
    options: dict[str, str] = {}
    """Passed to the object store client: endpoint, region, credentials."""
    presigned_puts: Literal["api", "bucket"] = "api"
    """Where a presigned PUT goes: through the API, or, with `s3://` only, to the bucket itself."""


class Secrets(Strict, frozen=True, kw_only=True):
    keys: tuple[str, ...]
    """Base64 of 32 bytes each. The first seals and signs, all open and verify."""

    def __repr__(self) -> str:
        return f"Secrets({len(self.keys)} keys)"


class Http(Strict, frozen=True, kw_only=True):
    cors_origins: tuple[str, ...] = ()
    """Origins that may presign, PUT and complete from a browser; `*` for any."""
    public_url: str | None = None
    """Base of the URLs we hand out, e.g. `https://inference.example.com`; default: as the request came."""
    header_timeout_s: float = 10.0
    """A connection whose request headers are not complete after this is closed."""
    body_grace_s: float = 30.0
    """How long a body may take whatever its size; beyond it `min_body_bytes_per_s` holds."""
    min_body_bytes_per_s: int = 16_384
    """Slower bodies are answered 408, so that no connection is kept busy for ever."""
    max_connections: int = 8_192
    """Open connections of one API process; further ones are closed at once."""


class Limits(Strict, frozen=True, kw_only=True):
    completion_window_s: float = 86_400
    """Life of a batch from its creation."""
    request_time_limit_s: float = 1_800
    """One model call, from the moment it is sent."""
    max_attempts: int = 5
    """Calls sent for one record that failed on the server's side."""
    retry_backoff_s: float = 1.0
    """Wait before the second attempt; doubles each time, up to 60 s."""
    expiry_grace_s: float = 60
    """After the window, how long settle waits for dispatchers to close a batch before it does."""
    drain_s: float = 20
    """How long a stopping process lets running calls finish."""
    max_file_bytes: int = 200_000_000
    max_records: int = 50_000
    max_record_bytes: int = 16_777_216
    presign_ttl_s: int = 900
    file_ttl_s: int = 2_592_000
    max_waiting_records: int = 5_000_000
    """Per organization: accepted records of batches that have not ended.

    Creates that meet in the same instant on several API instances may exceed it, each instance by no more
    than its own creates under way: at most to the limit times the instances."""
    max_concurrent_uploads: int = 32
    """Uploads and large creates at once in one API process, whose memory and threads they take; else 429.

    One organization alone gets at most two thirds of them."""
    stuck_after_s: float = 600
    """A record that is neither settled nor in flight for this long is reported as stuck."""


class Egress(Strict, frozen=True, kw_only=True):
    allow_cidrs: tuple[str, ...] = ()
    """Non-public ranges that tools and callbacks may connect to."""
    allow_http: bool = False
    """Whether tools and callbacks may use plain http."""


class Metrics(Strict, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    """Where each role shows its metrics to Prometheus."""
    port: int = 0
    """0: any free port, which the control host finds; another one suits a machine with a single role."""


class Organization(Strict, frozen=True, kw_only=True):
    id: str
    features: tuple[str, ...] = ("batch",)
    """`batch` opens the batch and file routes, `workflows` allows `openrelay.workflow`."""
    api_keys: tuple[str, ...] = ()
    """Taken as written; for development. `openrelay keys create` otherwise."""
    weight: float = 1.0
    """Share of the GPUs relative to other organizations with work waiting."""

    def __repr__(self) -> str:
        return f"Organization(id={self.id!r}, features={self.features!r}, {len(self.api_keys)} keys)"


class Pool(Strict, frozen=True, kw_only=True):
    base_url: str
    """OpenAI-compatible server, up to and with `/v1`."""
    api_key: str | None = None
    model: str | None = None
    """The model's name on that server; default: the same."""
    max_concurrency: int = 256
    """Calls that all dispatchers together may have running there."""

    @property
    def address(self) -> str:
        """Host and port: what may be shown of `base_url`, which may hold a password."""
        try:
            parts = urlsplit(self.base_url)
            host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
            return f"{host}:{parts.port}" if parts.port else str(host)
        except ValueError:
            return "not an address"

    def __repr__(self) -> str:
        return f"Pool({self.address}, model={self.model!r}, max_concurrency={self.max_concurrency})"


class Model(Strict, frozen=True, kw_only=True):
    input_nano_usd_per_mtok: int
    output_nano_usd_per_mtok: int
    cached_input_nano_usd_per_mtok: int | None = None
    """Default: the input price."""
    pools: tuple[Pool, ...] = ()


class Settings(Strict, frozen=True, kw_only=True):
    """Everything a process needs to know, resolved: nothing here says "embedded" any more."""

    data_dir: str
    """Directory for local state: read model, spools, logs."""
    kafka: Kafka
    clickhouse: ClickHouse
    storage: Storage
    secrets: Secrets
    http: Http = Http()
    limits: Limits = Limits()
    egress: Egress = Egress()
    metrics: Metrics = Metrics()
    organizations: tuple[Organization, ...] = ()
    models: dict[str, Model] = {}
