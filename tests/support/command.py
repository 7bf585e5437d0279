"""Our commands as child processes run them from a checkout."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def openrelay() -> list[str]:
    """The start of an `openrelay` command line."""
    return [sys.executable, "-P", "-m", "services.cli.openrelay"]


def environment(**variables: str) -> dict[str, str]:
    """This process's environment without settings of its own, with the checkout on the path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OPENRELAY_")}
    return (
        kept
        | {"PYTHONPATH": ":".join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
        | variables
    )
