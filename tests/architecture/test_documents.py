"""What documents and examples say is what the code says."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from schemas.settings import Settings
from services.cli.openrelay import app
from services.embedded.resolve import PLACEHOLDERS, Ports, resolve
from services.settings import load
from tests.architecture.topics_table import documents, written
from tests.support.command import ROOT
from tests.support.settings import SECRET


def test_the_table_of_topics_is_the_catalogue() -> None:
    assert ROOT / "streams" / "README.md" in documents()
    for document in documents():
        text = document.read_text("utf-8")
        assert written(text) == text, f"{document}: run python -m tests.architecture.topics_table"


def test_the_example_names_every_setting() -> None:
    text = (ROOT / "openrelay.example.toml").read_text("utf-8")
    named = set(re.findall(r"^(?:# )?(\w+) = ", text, re.MULTILINE))
    tables = set(re.findall(r"\w+", " ".join(re.findall(r"^(?:# )?\[.*\]$", text, re.MULTILINE))))
    assert _keys(Settings) <= named | tables


def _keys(kind: Any) -> set[str]:
    found = set()
    for field in msgspec.structs.fields(kind):
        found.add(field.name)
        for inner in (field.type, *getattr(field.type, "__args__", ())):
            if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
                found |= _keys(inner)
    return found


def test_the_example_is_good_as_it_is_and_with_every_key_in_use(tmp_path: Path) -> None:
    text = (ROOT / "openrelay.example.toml").read_text("utf-8")
    ports = Ports(*range(1, 7))
    assert resolve(tomllib.loads(text), tmp_path, ports, PLACEHOLDERS).simulated
    used = re.sub(r"^# (\w+ = .*|\[.*\])$", r"\1", text, flags=re.MULTILINE)
    used = used.replace('keys = ["…"]', f'keys = ["{SECRET}"]', 1).replace("or_…", "or_0123456789abcdef")
    used = used.replace('api_key = "…"', 'api_key = "sk-1"')
    resolved = resolve(tomllib.loads(used), tmp_path, ports, PLACEHOLDERS)
    assert not any(resolved[1:])


@pytest.fixture
def compose() -> dict[str, Any]:
    text = (ROOT / "docker-compose.yml").read_text("utf-8")
    text = re.sub(r"\$\{OPENRELAY_SECRET:\?[^}]*\}", SECRET, text)
    parsed: dict[str, Any] = yaml.safe_load(text)
    return parsed


def test_compose_has_every_role_with_a_slot_of_its_own(compose: dict[str, Any]) -> None:
    commands = [service["command"] for service in compose["services"].values() if "command" in service]
    assert {command[0] for command in commands} == {
        "migrate", "simulate", "api", "control", "dispatch", "settle", "sink", "meter"
    }  # fmt: skip
    assert len({tuple(command) for command in commands}) == len(commands)


def test_compose_commands_exist(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        if "command" in service:
            _, bound, _ = app.parse_args(service["command"], exit_on_error=False, print_error=False)
            assert bound is not None, name


def test_compose_settings_are_good(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        if "command" in service:
            settings = load(None, service["environment"])
            assert settings.kafka.replication_factor == 3, name
            assert settings.models


def test_compose_names_only_what_it_has(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for name, service in services.items():
        assert set(service.get("depends_on", {})) <= set(services), name
        for volume in service.get("volumes", []):
            assert volume.split(":")[0] in compose["volumes"], name


def test_make_targets_and_ci() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in ("setup", "demo", "up", "test", "test-faults", "check", "bench"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    ci = (ROOT / ".ci" / "run").read_text("utf-8")
    for target in ("check", "test", "test-faults"):
        assert f"make {target}\n" in ci
