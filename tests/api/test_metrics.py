"""What an API process shows of itself, on a port that is not its customers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.api.host import Host, create, jsonl, record, stored


def shown(host: Host) -> dict[tuple[str, tuple[str, ...]], float]:
    address: dict[str, Any] = json.loads(
        (Path(host.settings.data_dir) / "run" / "metrics" / "api.json").read_text("utf-8")
    )
    text = httpx.get(address["url"], trust_env=False).raise_for_status().text
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def grown(before: dict[Any, float], after: dict[Any, float], name: str, *labels: str) -> float:
    return after.get((name, labels), 0) - before.get((name, labels), 0)


def test_requests_uploads_and_validation_are_counted(host: Host, client: httpx.Client) -> None:
    before = shown(host)
    content = jsonl([record("a"), record("b"), {"no": "record"}])
    file = stored(client, content)
    batch = create(client, input_file_id=file)["id"]
    assert client.get(f"/v1/batches/{batch}").status_code == 200
    assert client.get("/v1/files/file-nowhere").status_code == 404
    assert client.get("/somewhere/else?key=or_secret").status_code == 404
    after = shown(host)
    for labels in (
        ("POST", "/v1/files", "200"),
        ("POST", "/v1/batches", "200"),
        ("GET", "/v1/batches/{batch}", "200"),
        ("GET", "/v1/files/{file}", "404"),
        ("GET", "other", "404"),
    ):
        assert grown(before, after, "openrelay_api_requests_total", *labels) == 1, labels
    assert grown(before, after, "openrelay_api_uploads_total") == 1
    assert grown(before, after, "openrelay_api_upload_bytes_total") == len(content)
    assert grown(before, after, "openrelay_api_validated_bytes_total") == len(content)
    assert grown(before, after, "openrelay_api_validated_records_total", "accepted") == 2
    assert grown(before, after, "openrelay_api_validated_records_total", "rejected") == 1
    assert grown(before, after, "openrelay_api_validation_seconds_count") == 1
    assert grown(before, after, "openrelay_api_request_seconds_count", "/v1/batches") == 1
    everything = " ".join(" ".join(labels) for _, labels in after)
    for secret in (batch, file, "or_secret", "somewhere"):
        assert secret not in everything


def test_metrics_are_not_on_the_customers_port(host: Host, client: httpx.Client) -> None:
    assert client.get("/metrics").status_code == 404
