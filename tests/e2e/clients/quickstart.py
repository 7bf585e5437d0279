"""The quickstart in the OpenAI Python SDK, and the rest of what the SDK can ask of files and batches.

Run by whichever version of the SDK is under test, in a directory that holds `requests.jsonl` and
`slow.jsonl`; base URL and key come from the environment. Prints what it saw as one JSON object.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, Final

import openai
from openai import OpenAI

ENDPOINT: Final = "/v1/chat/completions"
TERMINAL = {"completed", "failed", "expired", "cancelled"}
DEADLINE_S = 120


def refused(call: Any) -> list[Any]:
    """Class, status and code of the SDK's exception."""
    try:
        call()
    except openai.APIStatusError as error:
        return [type(error).__name__, error.status_code, error.code]
    return []


def finish(client: OpenAI, batch: Any) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while batch.status not in TERMINAL:
        assert time.monotonic() < deadline, batch
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    return batch


def main() -> dict[str, Any]:
    seen: dict[str, Any] = {"version": openai.__version__}
    client = OpenAI(
        base_url=os.environ["OPENRELAY_BASE_URL"],
        api_key=os.environ["OPENRELAY_API_KEY"],
    )

    with open("requests.jsonl", "rb") as requests:
        batch_input = client.files.create(file=requests, purpose="batch")
    seen["file"] = [batch_input.object, batch_input.purpose, batch_input.status]
    seen["filename_follows_id"] = batch_input.filename == f"{batch_input.id}.jsonl"
    seen["bytes"] = batch_input.bytes == os.path.getsize("requests.jsonl")

    batch = client.batches.create(
        input_file_id=batch_input.id,
        endpoint=ENDPOINT,
        completion_window="24h",
        metadata={"from": "the SDK"},
    )
    counts = batch.request_counts
    assert counts is not None
    seen["created"] = [batch.status, counts.total, counts.completed, counts.failed]
    seen["batch_input"] = batch.input_file_id == batch_input.id
    seen["metadata"] = batch.metadata

    batch = finish(client, batch)
    counts = batch.request_counts
    assert counts is not None
    seen["ended"] = [batch.status, counts.total, counts.completed, counts.failed]
    seen["output_file"] = batch.output_file_id == f"file-{batch.id}-output"
    seen["error_file"] = batch.error_file_id
    assert batch.usage is not None
    seen["usage"] = [batch.usage.input_tokens, batch.usage.output_tokens, batch.usage.total_tokens]

    assert batch.output_file_id is not None
    client.files.content(batch.output_file_id).write_to_file("results.jsonl")
    with open("results.jsonl", encoding="utf-8") as results:
        lines = [json.loads(line) for line in results]
    seen["results"] = {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in lines
    }

    seen["file_again"] = client.files.retrieve(batch_input.id) == batch_input
    seen["input_content"] = client.files.content(batch_input.id).read() == Path("requests.jsonl").read_bytes()
    seen["listed"] = batch_input.id in [file.id for file in client.files.list(purpose="batch")]
    seen["unknown_purpose"] = [file.id for file in client.files.list(purpose="nonsense")]

    ids = [
        client.batches.create(
            input_file_id=batch_input.id,
            endpoint=ENDPOINT,
            completion_window="24h",
            extra_body={"priority": "expedited"},
        ).id
        for _ in range(3)
    ]
    paged = [each.id for each in client.batches.list(limit=1)]
    seen["paged"] = paged[:4] == [*reversed(ids), batch.id]
    seen["paged_once"] = len(paged) == len(set(paged))
    page = client.batches.list(limit=2)
    seen["page"] = [len(page.data), page.has_more]
    for each in ids:
        finish(client, client.batches.retrieve(each))

    with open("slow.jsonl", "rb") as slow:
        slow_input = client.files.create(file=slow, purpose="batch")
    running = client.batches.create(input_file_id=slow_input.id, endpoint=ENDPOINT, completion_window="24h")
    seen["in_use"] = refused(lambda: client.files.delete(slow_input.id))
    cancelled = client.batches.cancel(running.id)
    seen["cancel"] = cancelled.status
    cancelled = finish(client, cancelled)
    counts = cancelled.request_counts
    assert counts is not None
    seen["cancelled"] = [cancelled.status, counts.total, counts.completed + counts.failed]
    seen["cancel_again"] = refused(lambda: client.batches.cancel(running.id))

    deleted = client.files.delete(batch_input.id)
    seen["deleted"] = [deleted.id == batch_input.id, deleted.deleted]
    seen["gone"] = refused(lambda: client.files.retrieve(batch_input.id))
    seen["unknown_batch"] = refused(lambda: client.batches.retrieve("batch_unknown"))
    stranger = client.with_options(api_key="or_not_a_key_of_anybody")
    seen["stranger"] = refused(lambda: stranger.batches.list())
    return seen


if __name__ == "__main__":
    print(json.dumps(main()))
