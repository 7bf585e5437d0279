"""Nothing committed depends on where it was written."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.support.command import ROOT

_REGISTRIES = (
    ("pypi", "org"),
    ("files", "pythonhosted", "org"),
    ("repo", "maven", "apache", "org"),
    ("repo1", "maven", "org"),
    ("registry", "npmjs", "org"),
    ("proxy", "golang", "org"),
    ("crates", "io"),
    ("deb", "debian", "org"),
)
_PLACES = ("/work/" + "main", "/tmp/" + "probe", "/root/" + ".cache")


def test_no_registry_host_and_no_path_of_a_machine() -> None:
    forbidden = re.compile(
        "|".join([*(r"\.".join(parts) for parts in _REGISTRIES), *map(re.escape, _PLACES)])
    )
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        file = ROOT / name
        if file.is_file():
            found = forbidden.search(file.read_bytes().decode("utf-8", "replace"))
            assert found is None, f"{name}: {found and found[0]}"


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements.runtime.lock"])
def test_locked_packages_carry_hashes_and_no_place_to_get_them(lock: str) -> None:
    text = (ROOT / lock).read_text("utf-8")
    assert "://" not in text
    pins = re.findall(
        r"^([\w.\-\[\]]+)==[^\n]*\\\n((?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", text, re.MULTILINE
    )
    assert len(pins) == len(re.findall(r"^[\w.\-\[\]]+==", text, re.MULTILINE)) > 50


def test_what_runs_in_production_is_what_is_tested() -> None:
    def pins(lock: str) -> set[str]:
        return set(re.findall(r"^[\w.\-\[\]]+==[^ ;\n]+", (ROOT / lock).read_text("utf-8"), re.MULTILINE))

    assert pins("requirements.runtime.lock") < pins("requirements.lock")
