"""Clients that are not part of the development environment, installed once and kept in the user's cache.

Each lies in a directory named after what was asked for; it is built under another name and renamed when it
is whole, so that an interrupted installation is never used.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import platformdirs

HERE = Path(__file__).parent
CACHE = platformdirs.user_cache_path("openrelay-client-tests")


def python_sdk(requirements: str) -> Path:
    """An interpreter that has the packages of a pinned requirements file beside this module."""

    def build(directory: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
        pip = [str(directory / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--quiet", "-r", str(HERE / requirements)], check=True)

    return _cached("python", [HERE / requirements], build) / "bin" / "python"


def node_sdk() -> Path:
    """A directory whose `node_modules` are those of the lock file beside this module."""

    def build(directory: Path) -> None:
        directory.mkdir()
        for name in ("package.json", "package-lock.json"):
            shutil.copy(HERE / name, directory)
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        subprocess.run(command, cwd=directory, check=True, stdout=subprocess.DEVNULL)

    return _cached("node", [HERE / "package.json", HERE / "package-lock.json"], build)


def _cached(kind: str, inputs: list[Path], build: Callable[[Path], None]) -> Path:
    digest = hashlib.sha256(sys.version.encode())
    for path in inputs:
        digest.update(path.read_bytes())
    directory = CACHE / f"{kind}-{digest.hexdigest()[:16]}"
    if not directory.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        partial = directory.with_name(f"{directory.name}.{os.getpid()}")
        shutil.rmtree(partial, ignore_errors=True)
        build(partial)
        partial.rename(directory)
    return directory
