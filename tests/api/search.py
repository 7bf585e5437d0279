"""Schemathesis against a running host: everything its document describes is sent, and much that is not.

It runs as a process of its own. `search` says what it found; a search that is repeatable sends the same each
time, but for what depends on the ids the host answers with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tomli_w

HOOKS = Path(__file__).with_name("search_hooks.py")
SEED = 1
SENDING = "examples,coverage,fuzzing"
"""The phases that send one request at a time."""
STATEFUL_STEPS = 20
MAX_RESPONSE_S = 10.0
"""Generous for a machine that is busy with other tests; what waits for a timeout of ours takes as long."""

REJECTED = ["400", "401", "403", "404", "409", "411", "413", "415", "416"]
"""How what is not described is refused. The contract adds 413 and 416 to what schemathesis takes for it."""
IN_RANGE_OR_NOT = ["2xx", "404", "416"]
"""Whether a range lies in the file only the file can tell."""


class Found:
    def __init__(self, status: int, text: str, directory: Path) -> None:
        self.status = status
        self.text = text
        self.report: dict[str, Any] = json.loads((directory / "report.json").read_bytes())
        self.kinds = {
            (each["type"], operation) for each in self.report["failures"] for operation in each["operations"]
        }
        """What failed, and of which operation."""
        self.followed = set(_followed(directory / "events.ndjson"))
        """Links after which an answer was 2xx: the operation they come from, and their name."""

    @property
    def accepted(self) -> set[str]:
        """Operations that took something described and answered 2xx."""
        rates: dict[str, dict[str, Any]] = self.report["valid_rates"]
        return {name for name, phases in rates.items() if any(each["accepted"] for each in phases.values())}


def search(
    url: str,
    directory: Path,
    keys: Mapping[str, str],
    *,
    examples: int,
    document: Mapping[str, Any] | None = None,
    repeatable: bool = True,
    phases: str = SENDING,
    operations: Iterable[str] = (),
) -> Found:
    """All checks on the host at `url`, by its own document unless another is given.

    The phase `stateful`, which follows links, is best a search of its own: what others have learned of the
    host cuts it short.

    `keys` are of callers who must not see each other's objects; the first is used. `operations` are the ids
    of those to be asked, all if none is named.
    """
    directory.mkdir(parents=True, exist_ok=True)
    users = [
        {"name": name, "fixedHeaders": [{"name": "Authorization", "value": f"Bearer {key}"}]}
        for name, key in keys.items()
    ]
    (directory / "keys.yaml").write_text(json.dumps({"auth": users}))
    (directory / "search.toml").write_text(tomli_w.dumps(_config(list(keys), examples, repeatable)))
    location = f"{url}/openapi.json"
    if document is not None:
        location = str(directory / "document.json")
        Path(location).write_text(json.dumps(document))
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", "search.toml", "run", location]
    command += [
        "--url",
        url,
        "--checks",
        "all",
        "--phases",
        phases,
        "--max-response-time",
        str(MAX_RESPONSE_S),
    ]
    command += ["--continue-on-failure", "--no-color", "--output-truncate", "false"]
    command += ["--report-json-path", "report.json", "--report-ndjson-path", "events.ndjson"]
    command += [word for each in operations for word in ("--include-operation-id", each)]
    if repeatable:
        command += ["--seed", str(SEED)]
    done = subprocess.run(
        command,
        cwd=directory,
        env={name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout
    return Found(done.returncode, done.stdout, directory)


def _config(users: list[str], examples: int, repeatable: bool) -> dict[str, Any]:
    generation = {"database": "none", "deterministic": repeatable}
    return {
        "hooks": str(HOOKS),
        "auth": {"wfc": {"path": "keys.yaml", "user": users[0]} | ({"peers": users} if users[1:] else {})},
        "cache": {"enabled": False},
        # Keys that are made up get no further than 401; that check makes some up itself.
        "generation": generation | {"with-security-parameters": False},
        "checks": {"negative_data_rejection": {"expected-statuses": REJECTED}},
        "phases": {
            "fuzzing": {"generation": {"max-examples": examples}},
            "stateful": {
                "max-steps": STATEFUL_STEPS,
                # Only links that are described: what else has an id in common need not fit together.
                "inference": {"algorithms": []},
                # What follows from an answer is looked at when the way there was right.
                "generation": {"mode": "positive", "max-examples": examples},
            },
        },
        "operations": [
            {
                "include-operation-id": "getFileContent",
                "checks": {"positive_data_acceptance": {"expected-statuses": IN_RANGE_OR_NOT}},
            }
        ],
    }


def _followed(events: Path) -> list[tuple[str, str]]:
    found = []
    for line in events.read_text("utf-8").splitlines():
        recorder = json.loads(line).get("ScenarioFinished", {}).get("recorder", {})
        for name, case in recorder.get("cases", {}).items():
            answer = (recorder["interactions"].get(name) or {}).get("response")
            transition = case.get("transition")
            if transition is not None and answer is not None and 200 <= answer["status_code"] < 300:
                source, _, rest = transition["id"].partition(" -> ")
                found.append((source, rest.split(" ")[1]))
    return found
