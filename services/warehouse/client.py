"""Talking to ClickHouse, the embedded one or a server, over HTTP."""

from __future__ import annotations

from typing import Any

import clickhouse_connect

from schemas.settings import ClickHouse

CONNECT_TIMEOUT_S = 10
ANSWER_TIMEOUT_S = 120


def connect(clickhouse: ClickHouse) -> Any:
    """A client for one thread at a time. Connects at once; raises the client's errors.

    Without a session, since a session would refuse a second statement while one runs; and without the
    client's own limit of rows.
    """
    return clickhouse_connect.get_client(
        dsn=clickhouse.url,
        autogenerate_session_id=False,
        connect_timeout=CONNECT_TIMEOUT_S,
        send_receive_timeout=ANSWER_TIMEOUT_S,
        query_limit=0,
    )
