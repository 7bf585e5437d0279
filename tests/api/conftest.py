"""A broker and an API process of their own for the tests of the inference host."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from schemas.settings import Egress, Model, Organization, Pool, Settings, Storage
from streams.kafka.admin import create_topics
from tests.api.host import ACME, IDLE, RIVAL, Facts, Host
from tests.support.broker import EmbeddedBroker
from tests.support.settings import settings_for


@pytest.fixture(scope="session")
def api_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """Facts of other tests' batches would send the intake of this API looking for their objects."""
    running = EmbeddedBroker(tmp_path_factory.mktemp("api-kafka"))
    running.start()
    try:
        yield running
    finally:
        running.stop()


def api_settings(broker: EmbeddedBroker, directory: Path, **fields: Any) -> Settings:
    """Three organizations: with workflows, without, and without batch; two models nobody runs.

    All APIs on one broker share one storage, as their intakes share the batches.
    """
    pools = (Pool(base_url="http://127.0.0.1:1/v1"),)
    organizations = (
        Organization(id="acme", features=("batch", "workflows"), api_keys=(ACME,)),
        Organization(id="rival", api_keys=(RIVAL,)),
        Organization(id="idle", features=(), api_keys=(IDLE,)),
    )
    models = {
        "m": Model(input_nano_usd_per_mtok=100, output_nano_usd_per_mtok=200, pools=pools),
        "n": Model(input_nano_usd_per_mtok=1, output_nano_usd_per_mtok=2, pools=pools),
    }
    defaults = {
        "organizations": organizations,
        "models": models,
        "egress": Egress(),
        "storage": Storage(url=f"file://{broker.directory}/blobs"),
    }
    settings = settings_for(directory, bootstrap=broker.bootstrap, **(defaults | fields))
    create_topics(settings)
    return settings


@pytest.fixture(scope="module")
def host(api_broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    directory = tmp_path_factory.mktemp("api")
    with Host(directory, api_settings(api_broker, directory)) as running:
        yield running


@pytest.fixture
def client(host: Host) -> Iterator[httpx.Client]:
    with host.client() as acme:
        yield acme


@pytest.fixture
def rival(host: Host) -> Iterator[httpx.Client]:
    with host.client(RIVAL) as other:
        yield other


@pytest.fixture
def facts(host: Host) -> Iterator[Facts]:
    writer = Facts(host.settings)
    yield writer
    writer.close()


@pytest.fixture
def fresh(host: Host, facts: Facts, client: httpx.Client) -> Iterator[httpx.Client]:
    """A caller of an organization that has nothing yet."""
    key = facts.issue(f"org-{secrets.token_hex(8)}")
    client.get("/v1/files").raise_for_status()
    with host.client(key) as caller:
        yield caller
