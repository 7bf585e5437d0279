"""The embedded warehouse, seen by an unmodified ClickHouse client over HTTP."""

from __future__ import annotations

import gzip
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import clickhouse_connect
import lz4.frame
import pytest
from backports import zstd
from clickhouse_connect.driver.exceptions import DatabaseError

from tests.support.command import environment, openrelay
from tests.support.warehouse import EmbeddedWarehouse


@pytest.fixture
def client(warehouse: EmbeddedWarehouse) -> Iterator[Any]:
    connected = warehouse.client()
    connected.command("CREATE DATABASE IF NOT EXISTS suite ENGINE = Atomic")
    connected.command(
        "CREATE OR REPLACE TABLE suite.t (a UInt64, s String, at DateTime64(3, 'UTC') DEFAULT 0) "
        "ENGINE = MergeTree ORDER BY a"
    )
    yield connected
    connected.close()


def test_the_client_connects_with_its_defaults(warehouse: EmbeddedWarehouse) -> None:
    client = clickhouse_connect.get_client(host="127.0.0.1", port=warehouse.port)
    assert client.ping()
    assert client.command("SELECT 5") == 5
    assert client.command("SELECT timezone()") == "UTC"
    client.close()


def test_rows_of_every_kind_come_back_as_they_went(client: Any) -> None:
    rows = [
        [1, "é`'\"\\\t\n\0", datetime(2026, 1, 2, 3, 4, 5, 678000, UTC)],
        [2**64 - 1, "", datetime(1970, 1, 1)],
    ]
    summary = client.insert("suite.t", rows, column_names=["a", "s", "at"])
    assert summary.written_rows == 2
    read = client.query("SELECT a, s, toUnixTimestamp64Milli(at) FROM suite.t ORDER BY a").result_rows
    assert read == [(1, rows[0][1], 1767323045678), (2**64 - 1, "", 0)]


def test_parameters(client: Any) -> None:
    client.insert("suite.t", [[n, str(n)] for n in range(10)], column_names=["a", "s"])
    asked = client.query(
        "SELECT s FROM suite.t WHERE a IN {wanted:Array(UInt64)} OR s = {s:String} ORDER BY a",
        parameters={"wanted": [2, 3], "s": "7"},
    )
    assert asked.result_rows == [("2",), ("3",), ("7",)]
    hostile = "it's \\ \t\n a`"
    assert client.query("SELECT {s:String}", parameters={"s": hostile}).result_rows == [(hostile,)]


def test_long_parameters_travel_as_a_form(warehouse: EmbeddedWarehouse) -> None:
    client = clickhouse_connect.get_client(dsn=warehouse.url, form_encode_query_params=True)
    value = "x" * 2_000_000
    assert client.query("SELECT length({s:String})", parameters={"s": value}).result_rows == [(2_000_000,)]
    client.close()


@pytest.mark.parametrize(
    "query", ["SELECT a, s FROM suite.t", "SELECT a, s FROM suite.t WHERE a = {a:UInt64}"]
)
def test_no_rows_still_have_columns(client: Any, query: str) -> None:
    result = client.query(query, parameters={"a": 99})
    assert result.column_names == ("a", "s")
    assert result.result_rows == []
    assert client.query(query + " LIMIT 0", parameters={"a": 99}).column_names == ("a", "s")


def test_dataframes_and_arrow(client: Any) -> None:
    client.insert("suite.t", [[1, "x"], [2, "y"]], column_names=["a", "s"])
    assert client.query_arrow("SELECT a, s FROM suite.t ORDER BY a").to_pylist() == [
        {"a": 1, "s": "x"},
        {"a": 2, "s": "y"},
    ]


@pytest.mark.parametrize(
    ("compression", "encode"),
    [(None, bytes), ("gzip", gzip.compress), ("lz4", lz4.frame.compress), ("zstd", zstd.compress)],
)
def test_raw_inserts_in_every_encoding(client: Any, compression: str | None, encode: Any) -> None:
    body = b"".join(b'{"a":%d,"s":"FORMAT VALUES"}\n' % n for n in range(1_000))
    done = client.raw_insert("suite.t", ["a", "s"], encode(body), fmt="JSONEachRow", compression=compression)
    assert done.written_rows == 1_000
    assert client.command("SELECT sum(a) FROM suite.t WHERE s = 'FORMAT VALUES'") == 499_500


@pytest.mark.parametrize("compress", [True, False, "lz4", "zstd", "gzip"])
def test_inserts_in_every_encoding_the_client_offers(
    warehouse: EmbeddedWarehouse, client: Any, compress: Any
) -> None:
    other = clickhouse_connect.get_client(dsn=warehouse.url, compress=compress)
    other.insert("suite.t", [[n, "x" * 100] for n in range(5_000)], column_names=["a", "s"])
    assert client.command("SELECT count() FROM suite.t") == 5_000
    other.close()


def test_inserts_by_values_and_select(client: Any) -> None:
    client.command("INSERT INTO suite.t (a, s) VALUES (1, 'FORMAT x\n'), (2, 'b')")
    client.command("INSERT INTO suite.t (a, s) SELECT a + 10, s FROM suite.t")
    assert client.query("SELECT a FROM suite.t ORDER BY a").result_columns == [[1, 2, 11, 12]]


def test_settings_hold_for_one_request_only(client: Any) -> None:
    query = "SELECT getSetting('max_threads')"
    assert client.query(query, settings={"max_threads": 1}).result_rows == [(1,)]
    assert client.query(query).result_rows != [(1,)]
    assert client.command("SELECT getSetting('async_insert')") == "false"


def test_the_database_of_the_client(warehouse: EmbeddedWarehouse, client: Any) -> None:
    client.insert("suite.t", [[1, "x"]], column_names=["a", "s"])
    other = clickhouse_connect.get_client(dsn=warehouse.url, database="suite")
    assert other.query("SELECT count() FROM t").result_rows == [(1,)]
    other.close()


@pytest.mark.parametrize(
    ("sql", "code", "status"),
    [
        ("SELECT * FROM suite.absent", 60, 404),
        ("SELEC 1", 62, 400),
        ("SELECT absent FROM suite.t", 47, 404),
        ("SELECT throwIf(1)", 395, 500),
        ("SELECT {x:UInt8}", 456, 400),
    ],
)
def test_refusals_carry_the_engines_code(
    client: Any, warehouse: EmbeddedWarehouse, sql: str, code: int, status: int
) -> None:
    with pytest.raises(DatabaseError) as refused:
        client.query(sql)
    assert refused.value.code == code
    with pytest.raises(urllib.error.HTTPError) as answered:
        urllib.request.urlopen(urllib.request.Request(warehouse.url, data=sql.encode()))
    with answered.value as answer:
        assert answer.code == status
        assert answer.headers["X-ClickHouse-Exception-Code"] == str(code)
        assert answer.read().startswith(b"Code: %d. DB::Exception: " % code)


def test_a_row_that_breaks_a_constraint_is_refused_and_nothing_is_stored(client: Any) -> None:
    client.command(
        "CREATE OR REPLACE TABLE suite.c (a Int64, CONSTRAINT positive CHECK a > 0) "
        "ENGINE = MergeTree ORDER BY a"
    )
    with pytest.raises(DatabaseError) as refused:
        client.insert("suite.c", [[1], [-1]], column_names=["a"])
    assert refused.value.code == 469
    assert client.command("SELECT count() FROM suite.c") == 0


def _get(url: str, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers or {})) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_plain_http(warehouse: EmbeddedWarehouse, client: Any) -> None:
    assert _get(f"{warehouse.url}/?query=SELECT+1,%7Bx:String%7D&param_x=abc") == (200, b"1\tabc\n")
    assert _get(f"{warehouse.url}/?query=SELECT+1+AS+x&default_format=JSONEachRow") == (200, b'{"x":1}\n')
    assert _get(f"{warehouse.url}/ping") == (200, b"Ok.\n")


def test_a_get_changes_nothing(warehouse: EmbeddedWarehouse, client: Any) -> None:
    assert _get(f"{warehouse.url}/?query=DROP+TABLE+suite.t")[0] == 403
    assert client.command("EXISTS suite.t") == 1


def test_other_users_and_web_pages_are_refused(warehouse: EmbeddedWarehouse) -> None:
    with pytest.raises(DatabaseError) as refused:
        clickhouse_connect.get_client(dsn=warehouse.url, username="default", password="guess")
    assert refused.value.code == 516
    assert _get(f"{warehouse.url}/?query=SELECT+1", {"Origin": "http://evil.example"})[0] == 403


def test_statements_do_not_wait_for_each_other(warehouse: EmbeddedWarehouse) -> None:
    together = threading.Barrier(4)
    spans: list[tuple[float, float]] = []

    def sleep() -> None:
        own = warehouse.client()
        together.wait(30)
        began = time.monotonic()
        own.query("SELECT sleep(3)")
        spans.append((began, time.monotonic()))
        own.close()

    quick = warehouse.client()
    sleepers = [threading.Thread(target=sleep) for _ in range(3)]
    for sleeper in sleepers:
        sleeper.start()
    together.wait(30)
    assert quick.command("SELECT 1") == 1
    answered = time.monotonic()
    for sleeper in sleepers:
        sleeper.join()
    quick.close()
    assert answered < min(end for _, end in spans)
    assert max(end for _, end in spans) - min(began for began, _ in spans) < 3 * 3


def test_one_process_a_directory(warehouse: EmbeddedWarehouse) -> None:
    command = [*openrelay(), "warehouse", "--data", str(warehouse.directory / "data"), "--port", "0"]
    second = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert second.returncode == 1
    assert "is used by another warehouse" in second.stderr
    assert len(second.stderr.splitlines()) == 1


def test_acknowledged_rows_survive_a_kill(tmp_path: Path) -> None:
    warehouse = EmbeddedWarehouse(tmp_path)
    warehouse.start()
    client = warehouse.client()
    client.command("CREATE TABLE kept (a UInt64) ENGINE = MergeTree ORDER BY a")
    acknowledged = 0
    for batch in range(30):
        client.insert("kept", [[batch * 10 + n] for n in range(10)], column_names=["a"])
        acknowledged += 10
    warehouse.kill()
    client.close()
    warehouse.start()
    client = warehouse.client()
    try:
        assert client.query("SELECT count(), uniqExact(a) FROM kept").result_rows == [
            (acknowledged, acknowledged)
        ]
    finally:
        client.close()
        warehouse.stop()
