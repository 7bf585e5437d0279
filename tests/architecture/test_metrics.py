"""The code shows the metrics of its catalogue, and no others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from services.api.counting import route_of
from streams import metrics
from streams.metrics import CATALOGUE, Entry
from tests.architecture.metrics_table import documents, written
from tests.support.command import ROOT

OBJECTS = {
    name: metric
    for name, metric in vars(metrics).items()
    if name.isupper() and name not in ("CATALOGUE", "SECONDS") and not name.startswith("_")
}
BOUNDED = {
    "cause", "endpoint", "group", "kind", "method", "model", "outcome", "partition", "role", "route",
    "status", "table", "topic", "verdict",
}  # fmt: skip
"""What may tell metrics apart: never anything that a customer chooses freely."""


def test_the_table_of_metrics_is_the_catalogue() -> None:
    assert ROOT / "streams" / "README.md" in documents()
    for document in documents():
        text = document.read_text("utf-8")
        assert written(text) == text, f"{document}: run python -m tests.architecture.metrics_table"


def test_names_say_what_they_are() -> None:
    assert len({entry.name for entry in CATALOGUE}) == len(CATALOGUE) == len(OBJECTS)
    for entry in CATALOGUE:
        area = "(lag|role)" if entry.owner == "control" else entry.owner
        assert re.fullmatch(rf"openrelay_{area}_[a-z_]+", entry.name), entry.name
        assert entry.name.endswith("_total") == (entry.kind == "counter"), entry.name
        assert entry.kind != "histogram" or entry.name.endswith("_seconds"), entry.name
        assert entry.help.endswith("."), entry.name
        assert set(entry.labels) <= BOUNDED, entry.name


def _uses() -> Iterator[tuple[Path, str, int | None]]:
    """Every mention of a metric in the code: its object, and how many labels it is given, None for none."""
    for file in [*(ROOT / "streams").rglob("*.py"), *(ROOT / "services").rglob("*.py")]:
        tree = ast.parse(file.read_text("utf-8"))
        labelled: dict[ast.expr, int | None] = {}
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "labels"
            ):
                starred = any(isinstance(each, ast.Starred) for each in node.args)
                labelled[node.func.value] = -1 if starred else len(node.args)
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in ("metrics", "catalogue")
                and node.attr in OBJECTS
            ):
                yield file, node.attr, labelled.get(node)


def test_every_metric_is_counted_somewhere_with_its_labels() -> None:
    names = dict(zip(OBJECTS, CATALOGUE, strict=True))
    used = set()
    for file, name, labels in _uses():
        used.add(name)
        if labels is not None and labels >= 0:
            assert labels == len(names[name].labels), f"{file}: {name}"
    assert used == set(OBJECTS)


def test_nothing_else_makes_a_metric() -> None:
    for file in [*(ROOT / "streams").rglob("*.py"), *(ROOT / "services").rglob("*.py")]:
        if file == ROOT / "streams" / "metrics.py":
            continue
        tree = ast.parse(file.read_text("utf-8"))
        imported = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "prometheus_client"
            for alias in node.names
        }
        called = {
            node.func.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert not imported & called & {"Counter", "Gauge", "Histogram", "Summary"}, file


@pytest.mark.parametrize("owner", sorted({entry.owner for entry in CATALOGUE}))
def test_a_role_shows_its_own(owner: str) -> None:
    text = generate_latest(metrics.registry(owner)).decode()
    families = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    families = {name: kind for name, kind in families.items() if not name.endswith("_created")}
    assert families == {entry.name: entry.kind for entry in _of(owner)}


def _of(owner: str) -> list[Entry]:
    return [entry for entry in CATALOGUE if entry.owner == owner]


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v1/files", "/v1/files"),
        ("/v1/files/presign", "/v1/files/presign"),
        ("/v1/files/file-1", "/v1/files/{file}"),
        ("/v1/files/file-1/content", "/v1/files/{file}/content"),
        ("/v1/batches/batch_1/cancel", "/v1/batches/{batch}/cancel"),
        ("/v1/batches/x", "/v1/batches/{batch}"),
        ("/v1/models/openrelay/gpt", "/v1/models/{model}"),
        ("/v1/uploads/file-1", "/v1/uploads/{file}"),
        ("/health", "/health"),
        ("/v1/batches/a/b/c", "other"),
        ("/etc/passwd", "other"),
    ],
)
def test_a_path_is_told_by_its_route(path: str, route: str) -> None:
    assert route_of(path) == route
