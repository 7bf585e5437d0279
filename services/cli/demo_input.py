"""The input of the demonstration: text that is on every machine that runs Python.

One record for each module of the standard library that has a docstring, asking for a summary of it. The
docstrings are read from the source files; nothing is imported. Some records are broken on purpose.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ENDPOINT = "/v1/chat/completions"
_SKIPPED = frozenset({"test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages"})
_SHORTEST = 20
_LONGEST = 4_000


class Broken(NamedTuple):
    """A line that will not run: the line, and the code it is rejected with."""

    line: str
    code: str


def docstrings() -> Iterator[tuple[str, str]]:
    """Name and docstring of the standard library's modules, in order of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[0] not in sys.stdlib_module_names or _SKIPPED.intersection(parts):
            continue
        if parts[-1] == "__init__":
            parts = parts[:-1]
        if any(part.startswith("_") for part in parts):
            continue
        text = _docstring(path)
        if len(text) >= _SHORTEST:
            yield ".".join(parts), text[:_LONGEST]


def _docstring(path: Path) -> str:
    """A source file's first string, if it begins with one; the rest of it is not read."""
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE):
                is_text = token.type == tokenize.STRING
                return inspect.cleandoc(str(ast.literal_eval(token.string))) if is_text else ""
    return ""


def record(custom_id: str, model: str, prompt: str) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 200}
    return {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body}


def write_input(path: Path, model: str) -> tuple[int, list[Broken]]:
    """Write the input file; the number of good records, and the broken ones among them."""
    lines = [
        json.dumps(record(name, model, f"Summarize the Python module {name} in one sentence.\n\n{text}"))
        for name, text in docstrings()
    ]
    good = len(lines)
    # The simulated model answers this one with an error of its own: it runs, and fails.
    lines.append(json.dumps(record("too-long", model, "status:400 (more text than the model can hold)")))
    broken = _broken(model, json.loads(lines[0])["custom_id"])
    for number, each in enumerate(broken):
        lines.insert((number + 1) * len(lines) // (len(broken) + 1), each.line)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return good, broken


def _broken(model: str, taken: str) -> list[Broken]:
    fine = record("broken", model, "This one never reaches the model.")
    body = fine["body"]
    return [
        Broken('{"custom_id": "cut-off", "method": "POST", "ur', "invalid_json"),
        Broken(json.dumps(fine | {"custom_id": taken}), "duplicate_custom_id"),
        Broken(json.dumps(fine | {"custom_id": None}), "invalid_custom_id"),
        Broken(json.dumps(fine | {"custom_id": "elsewhere", "url": "/v1/embeddings"}), "url_mismatch"),
        Broken(
            json.dumps(fine | {"custom_id": "streams", "body": body | {"stream": True}}),
            "stream_not_supported",
        ),
        Broken(
            json.dumps(fine | {"custom_id": "other", "body": body | {"model": "gpt-0"}}), "model_mismatch"
        ),
    ]
