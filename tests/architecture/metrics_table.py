"""The table of metrics as Markdown; run this module to write it into the documents that show it."""

from __future__ import annotations

import re
from pathlib import Path

from streams.metrics import CATALOGUE
from tests.support.command import ROOT

BEGIN, END = "<!-- metrics -->", "<!-- /metrics -->"
_BETWEEN = re.compile(re.escape(BEGIN) + r"\n.*?" + re.escape(END), re.DOTALL)


def table() -> str:
    rows = ["| metric | type | labels | shown by | what it says |", "| --- | --- | --- | --- | --- |"]
    rows += [
        f"| `{entry.name}` | {entry.kind} | {', '.join(entry.labels)} | {entry.owner} | {entry.help} |"
        for entry in CATALOGUE
    ]
    return "\n".join(rows)


def written(text: str) -> str:
    """A document with its table brought up to date."""
    return _BETWEEN.sub(lambda _: f"{BEGIN}\n{table()}\n{END}", text)


def documents() -> list[Path]:
    """The documents that show the table."""
    found = [ROOT / "README.md", *(ROOT / "streams").glob("*.md"), *(ROOT / "docs").glob("**/*.md")]
    return [path for path in found if path.exists() and BEGIN in path.read_text("utf-8")]


if __name__ == "__main__":
    for document in documents():
        document.write_text(written(document.read_text("utf-8")), "utf-8")
