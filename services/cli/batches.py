"""`orl batches`: create and follow batches."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from schemas.batches import ENDPOINTS, Batch
from services.cli import outcome
from services.cli.client import Client, Exit, Refused, Trouble, route
from services.cli.files import upload_file
from services.cli.inputs import Input, Look, inspect
from services.cli.output import (
    batch_bar,
    bytes_bar,
    local_time,
    money,
    print_json,
    print_table,
    say,
    tell_more,
)
from services.cli.results import save_results, tell_errors
from services.cli.session import Json, client_for, open_client, target
from services.cli.submission import notes, submit

MOST_LOOKED_AT_BYTES = 64 * 1024 * 1024
"""An uploaded file that is larger is not downloaded only to warn of what it may cost."""

app = App(name="batches", help="Create and follow batches.")


@app.command
def create(
    *,
    input_file: Path | None = None,
    input_file_id: str | None = None,
    endpoint: str,
    priority: Literal["standard", "expedited"] | None = None,
    metadata: Annotated[list[str] | None, Parameter(negative="", consume_multiple=False)] = None,
    completion_window: str = "24h",
    model: str | None = None,
    wait: Annotated[bool, Parameter(negative="")] = False,
    new: Annotated[bool, Parameter(negative="")] = False,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative="")] = False,
    json: Json = False,
) -> int:
    """Create a batch from a file here or a file uploaded before.

    Killed while it runs, and started again in the same words, it goes on with the same batch.

    Parameters
    ----------
    input_file
        JSONL file to upload.
    input_file_id
        Id of an uploaded file.
    endpoint
        The endpoint every record calls: /v1/chat/completions or /v1/completions.
    priority
        standard (the default) or expedited.
    metadata
        A pair NAME=VALUE to keep with the batch; may be given several times.
    completion_window
        Time the batch has to finish.
    model
        A hint at the model of the records.
    wait
        Wait until the batch has ended.
    new
        Submit again, even if an earlier run of this command did not come to its end.
    yes
        Do not ask before a batch whose tools or workflows may take many model calls, nor look for them in a
        file uploaded before.
    """
    if (input_file is None) == (input_file_id is None):
        raise Trouble("Give one of --input-file and --input-file-id.", Exit.USAGE)
    if endpoint not in ENDPOINTS:
        raise Trouble(f"--endpoint is one of {' and '.join(ENDPOINTS)}, not {endpoint!r}.", Exit.USAGE)
    arguments: dict[str, Any] = {"endpoint": endpoint, "completion_window": completion_window}
    given = {"priority": priority, "model": model, "metadata": _metadata(metadata or [])}
    arguments |= {name: value for name, value in given.items() if value}
    looked = None if input_file is None else inspect(input_file)
    if looked is not None:
        _warn_of_calls(looked, ask=not yes)

    server = target()
    source = looked.sha256 if looked is not None else input_file_id or ""
    kept = notes(server.base_url, server.api_key, source, arguments)
    if new:
        kept.remove()
    with client_for(server) as client:
        if input_file_id is not None and not yes:
            _look_at_uploaded(client, input_file_id)

        def uploaded() -> str:
            if input_file is None:
                return input_file_id or ""
            return str(upload_file(client, input_file)["id"])

        submitted = submit(client, kept, arguments, uploaded)
        batch = outcome.read_batch(submitted.batch)
        if submitted.resumed:
            say(f"going on with {batch.id}, which an earlier run submitted; --new submits again")
        elif wait:
            say(f"created {batch.id}")
        outcome.tell_rejected(batch)
        if not wait:
            print_json(submitted.batch)
            kept.remove()
            return Exit.OK
        ended = _wait(client, submitted.batch, tell_rejected=False)
    kept.remove()
    return ended


@app.command(name="get")
def get_batch(batch_id: str, /, *, json: Json = False) -> int:
    """Show a batch."""
    with open_client() as client:
        print_json(client.get(route("batches", batch_id)))
    return Exit.OK


@app.command(name="list")
def list_batches(*, limit: int | None = None, after: str | None = None, json: Json = False) -> int:
    """List batches, newest first."""
    with open_client() as client:
        page = client.get("/batches", limit=limit, after=after)
    if json:
        print_json(page)
        return Exit.OK
    rows = [_row(outcome.read_batch(value)) for value in page["data"]]
    print_table(["ID", "STATUS", "CREATED", "TOTAL", "COMPLETED", "FAILED", "COST", "MODEL"], rows)
    tell_more(page)
    return Exit.OK


@app.command
def cancel(batch_id: str, /, *, json: Json = False) -> int:
    """Stop a batch: what runs is finished, nothing new starts."""
    with open_client() as client:
        print_json(client.post(route("batches", batch_id, "cancel"), {}))
    return Exit.OK


@app.command(name="wait")
def wait_for(batch_id: str, /, *, json: Json = False) -> int:
    """Wait until a batch has ended, then show it."""
    with open_client() as client:
        return _wait(client, client.get(route("batches", batch_id)), tell_rejected=True)


@app.command
def results(
    batch_id: str,
    /,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"])] = Path(),
    json: Json = False,
) -> int:
    """Download the output and error files of a batch that has ended.

    Parameters
    ----------
    output
        Directory for the files, by default the current one.
    """
    with open_client() as client:
        batch = outcome.read_batch(client.get(route("batches", batch_id)))
        if not outcome.is_terminal(batch):
            raise Trouble(
                f"{batch.id} is {batch.status} and has no results yet; `orl batches wait {batch.id}` waits.",
                Exit.USAGE,
            )
        saved = save_results(client, batch, output)
    outcome.tell_end(batch)
    if json:
        print_json({name: file and {"path": file.path, "lines": file.lines} for name, file in saved.items()})
    else:
        rows = [(name, file.path, f"{file.lines} lines") for name, file in saved.items() if file is not None]
        print_table(["FILE", "PATH", "LINES"], rows)
    return outcome.exit_status(batch)


def _wait(client: Client, value: dict[str, Any], *, tell_rejected: bool) -> int:
    try:
        with batch_bar() as show:
            value = outcome.wait(client, value, show)
    except KeyboardInterrupt:
        say(f"{value['id']} goes on without us; `orl batches wait {value['id']}` waits for it again")
        raise
    batch = outcome.read_batch(value)
    tell_errors(client, batch, rejected=tell_rejected)
    outcome.tell_end(batch)
    print_json(value)
    return outcome.exit_status(batch)


def _look_at_uploaded(client: Client, file_id: str) -> None:
    """Download the file to see what it may cost. One that cannot be had is the business of the create."""
    try:
        size = client.get(route("files", file_id))["bytes"]
        if size > MOST_LOOKED_AT_BYTES:
            say(
                f"{file_id} is too large to look for tools and workflows in it; "
                "each record with tools may take max_rounds + 1 model calls, each workflow max_requests"
            )
            return
        look = Look()
        with bytes_bar(f"looking at {file_id}", size) as progress:
            client.download(file_id, look.take, progress)
    except Refused as refused:
        if refused.status != 404:
            raise
    else:
        _warn_of_calls(look.end(), ask=True)


def _warn_of_calls(looked: Input, *, ask: bool) -> None:
    if not looked.tool_records and not looked.workflow_records:
        return
    kinds = ((looked.tool_records, "call tools"), (looked.workflow_records, "are workflows"))
    what = " and ".join(f"{count} of {looked.records} records {kind}" for count, kind in kinds if count)
    warning = f"{what}: this batch may take up to {looked.most_calls:,} model calls"
    say(warning)
    terminal = next((stream for stream in (sys.stderr, sys.stdout) if stream.isatty()), None)
    if ask and sys.stdin.isatty() and terminal is not None:
        if terminal is not sys.stderr:
            print(warning, file=terminal)
        print("Go on? [y/N] ", end="", file=terminal, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise Trouble("Nothing was submitted.", Exit.USAGE)


def _metadata(pairs: list[str]) -> dict[str, str]:
    metadata = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise Trouble(f"--metadata takes NAME=VALUE, not {pair!r}.", Exit.USAGE)
        if name in metadata:
            raise Trouble(f"--metadata names {name!r} twice.", Exit.USAGE)
        metadata[name] = value
    return metadata


def _row(batch: Batch) -> tuple[object, ...]:
    counts = batch.request_counts
    cost = money(batch.usage.cost_nano_usd)
    created = local_time(batch.created_at)
    return (
        batch.id,
        batch.status,
        created,
        counts.total,
        counts.completed,
        counts.failed,
        cost,
        batch.model or "",
    )
