"""The wheel, installed as a user installs it, and run where folders have the names of our packages."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.command import ROOT

PACKAGES = ("services", "streams", "schemas")

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(directory),
        str(ROOT),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [built] = directory.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean environment with the wheel in it, and our dependencies borrowed from this one."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    command = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install"]
    done = subprocess.run(
        [*command, "--no-deps", "--no-index", str(wheel)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home


@pytest.fixture(scope="module")
def decoys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("decoys")
    for name in PACKAGES:
        (directory / name).mkdir()
        (directory / name / "__init__.py").write_text("raise SystemExit('the wrong folder was imported')\n")
    return directory


def _run(installed: Path, decoys: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith("OPENRELAY_")}
    return subprocess.run(
        [str(installed / "bin" / command[0]), *command[1:]],
        cwd=decoys,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_wheel_holds_our_packages_with_their_data_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == set(PACKAGES)
    assert "services/embedded/kafka.lock" in names
    assert "schemas/clickhouse/0001_billing.sql" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_every_package_directory_is_a_package() -> None:
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            assert (file.parent / "__init__.py").exists(), f"{file.parent} has no __init__.py"


@pytest.mark.parametrize("command", ["openrelay", "orl"])
def test_commands_run_beside_decoys(installed: Path, decoys: Path, command: str) -> None:
    done = _run(installed, decoys, command, "--help")
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_what_runs_is_what_was_installed(installed: Path, decoys: Path) -> None:
    code = "import services, streams, schemas; print(services.__file__, streams.__file__, schemas.__file__)"
    done = _run(installed, decoys, "python", "-P", "-c", code)
    assert done.returncode == 0, done.stderr
    assert all(name.startswith(str(installed)) for name in done.stdout.split())


def test_settings_are_checked_and_migrations_found(installed: Path, decoys: Path) -> None:
    done = _run(installed, decoys, "openrelay", "check")
    assert done.returncode == 0, done.stderr
    code = "from services.warehouse.migrate import migrations; print(len(migrations()))"
    assert int(_run(installed, decoys, "python", "-P", "-c", code).stdout) >= 1
