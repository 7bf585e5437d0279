"""The one way in which our processes open ClickHouse: over HTTP, whichever engine is behind it."""

from __future__ import annotations

from typing import Any

import clickhouse_connect

from schemas.settings import ClickHouse


def connect(settings: ClickHouse) -> Any:
    """A client that may be used from several threads; blocks until the server has answered.

    Raises the client's errors when it does not.
    """
    return clickhouse_connect.get_client(dsn=settings.url, autogenerate_session_id=False)
