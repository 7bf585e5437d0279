from __future__ import annotations

import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from schemas.batches import BatchUsage
from schemas.ids import BatchId
from schemas.records import Rejected
from schemas.workflows import WorkflowReport
from streams.core import merge


@given(st.lists(st.sets(st.integers(0, 60)), max_size=6))
def test_overlapping_runs_become_one_file_in_input_order(runs: list[set[int]]) -> None:
    entries = [iter([(i, b"line %d" % i) for i in sorted(run)]) for run in runs]
    expected = sorted(set().union(*runs))
    assert list(merge.in_input_order(entries)) == [(i, b"line %d" % i) for i in expected]


def test_lines_of_records_without_an_answer() -> None:
    batch = BatchId("batch_x")
    rejected = Rejected(index=4, line=9, code="invalid_json", message="m", param="body", custom_id=None)
    index, line = merge.rejected_line(batch, rejected)
    assert index == 4
    shown = json.loads(line)
    assert shown["custom_id"] is None
    assert shown["response"] is None
    assert shown["error"] == {"code": "invalid_json", "message": "m", "param": "body", "line": 9}
    _, line = merge.unfinished_line(batch, 4, b'{"custom_id":"r4","body":{}}', "batch_expired", "m")
    unfinished = json.loads(line)
    assert "openrelay" not in unfinished
    assert unfinished["error"] == {"code": "batch_expired", "message": "m"}
    assert unfinished["id"] == shown["id"], "a record's line has the same id whatever becomes of it"


def test_a_workflow_that_never_began_says_so_in_its_line() -> None:
    record = b'{"custom_id":"r4","body":{"openrelay":{"workflow":{"url":"https://x.test"}}}}'
    _, line = merge.unfinished_line(BatchId("batch_x"), 4, record, "batch_cancelled", "m")
    report = msgspec.json.decode(json.dumps(json.loads(line)["openrelay"]), type=WorkflowReport)
    assert report == WorkflowReport(0, 0, BatchUsage())
