"""`orl files`: input and result files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from services.cli.client import Client, Exit, route
from services.cli.inputs import inspect
from services.cli.output import bytes_bar, local_time, print_json, print_table, say, tell_more
from services.cli.results import save
from services.cli.session import Json, open_client

app = App(name="files", help="Input and result files.")
content = App(name="content", help="Contents of a file.")
app.command(content)


@app.command
def upload(file: Path, /, *, json: Json = False) -> int:
    """Upload a JSONL file of requests."""
    inspect(file)
    with open_client() as client:
        stored = upload_file(client, file)
    print_json(stored)
    return Exit.OK


@app.command(name="get")
def get_file(file_id: str, /, *, json: Json = False) -> int:
    """Show a file's metadata."""
    with open_client() as client:
        print_json(client.get(route("files", file_id)))
    return Exit.OK


@app.command(name="list")
def list_files(
    *,
    limit: int | None = None,
    after: str | None = None,
    order: Literal["asc", "desc"] | None = None,
    purpose: str | None = None,
    json: Json = False,
) -> int:
    """List files, newest first."""
    with open_client() as client:
        page = client.get("/files", limit=limit, after=after, order=order, purpose=purpose)
    if json:
        print_json(page)
        return Exit.OK
    rows = [
        (
            file["id"],
            file["purpose"],
            file["bytes"],
            local_time(file["created_at"]),
            local_time(file["expires_at"]),
        )
        for file in page["data"]
    ]
    print_table(["ID", "PURPOSE", "BYTES", "CREATED", "EXPIRES"], rows)
    tell_more(page)
    return Exit.OK


@app.command(name="delete")
def delete_file(file_id: str, /, *, json: Json = False) -> int:
    """Delete a file."""
    with open_client() as client:
        print_json(client.delete(route("files", file_id)))
    return Exit.OK


@content.command(name="get")
def get_content(
    file_id: str,
    /,
    *,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    json: Json = False,
) -> int:
    """Download a file, to standard output or to a file that is replaced when all of it has come."""
    with open_client() as client:
        if output is None:
            client.download(file_id, sys.stdout.buffer.write, lambda done, of: None)
            sys.stdout.buffer.flush()
            return Exit.OK
        saved = save(client, file_id, output)
    if json:
        print_json({"path": saved.path, "lines": saved.lines, "bytes": saved.bytes})
    else:
        say(f"wrote {saved.lines} lines, {saved.bytes} bytes, to {saved.path}")
    return Exit.OK


def upload_file(client: Client, file: Path) -> dict[str, Any]:
    """Upload with a bar; its file object."""
    size = file.stat().st_size
    with bytes_bar(file.name, size) as progress:
        stored = client.upload(file, lambda sent: progress(sent, size))
    say(f"uploaded {file} as {stored['id']}")
    return stored
