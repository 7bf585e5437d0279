"""Which stack an operator's command is about.

The settings file that is named, else the environment when it names a broker, else the embedded stack that
runs in the data directory of `OPENRELAY_DATA_DIR` or in this user's. The settings of a running stack are
complete: its supervisor has already laid the variables over them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from schemas.settings import Settings
from services.embedded import left
from services.process import CannotStart
from services.settings import PREFIX, SettingsError, default_data_dir, load


def settings_of(
    config: Path | None, environ: Mapping[str, str] | None = None, directory: Path | None = None
) -> Settings:
    """Settings of the stack. Raises CannotStart with a sentence that says what to do."""
    environ = os.environ if environ is None else environ
    directory = directory or Path(environ.get(f"{PREFIX}DATA_DIR") or default_data_dir())
    try:
        if config is not None:
            return load(config, {} if _is_running(config) else environ)
        if f"{PREFIX}KAFKA__BOOTSTRAP" in environ:
            return load(None, environ)
        running = directory / "run" / "settings.json"
        if _is_running(running):
            return load(running, {})
    except SettingsError as error:
        raise CannotStart(str(error)) from error
    more = " any more, it was killed" if left.was_killed(directory) else ""
    raise CannotStart(
        f"no stack runs in {directory}{more}: name its settings with --config, its data directory with"
        f" {PREFIX}DATA_DIR, or start one with `openrelay up --data {directory}`"
    )


def _is_running(settings: Path) -> bool:
    """Whether these are the settings of a running embedded stack, written by its supervisor."""
    directory = settings.parent
    return (
        settings.name == "settings.json"
        and directory.name == "run"
        and settings.exists()
        and left.runs(directory.parent)
    )
