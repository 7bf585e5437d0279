"""The operator's commands as `openrelay` shows them.

What a command needs is imported when it runs. Exit status: 0 good, 1 not good or not possible, 2 usage.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from schemas.facts import KeyRole
from services.process import CannotStart

Config = Annotated[
    Path | None,
    Parameter(help="Settings file; default: the environment, else the stack that runs on this machine."),
]
Json = Annotated[bool, Parameter(help="Print JSON.", negative="")]


def add_to(app: App) -> None:
    """Give `app` these commands."""
    keys = App(name="keys", help="Issue, list and revoke API keys.")
    keys.command(create)
    keys.command(list_, name="list")
    keys.command(revoke)
    app.command(keys)
    app.command(audit)
    app.command(lag)


def create(
    *,
    organization: Annotated[str, Parameter(help="Whose key it is; one of the settings.")],
    role: Annotated[
        KeyRole, Parameter(help="organization: its own data; finance: all usage; operator: everything.")
    ] = KeyRole.ORGANIZATION,
    name: Annotated[str, Parameter(help="A word to recognize it by.")] = "",
    config: Config = None,
    json: Json = False,
) -> int:
    """Issue a key and show it, once: only its fingerprint is kept."""
    from services.cli.output import print_json, say
    from services.operator import keys
    from services.operator.place import settings_of

    with _reported():
        issued = keys.create(settings_of(config), organization, role, name)
    if json:
        print_json({field: getattr(issued, field) for field in issued.__struct_fields__})
        return 0
    say(f"{issued.id}: a key of {issued.organization}, role {issued.role}; it is not shown again")
    print(issued.key, flush=True)
    return 0


def list_(*, config: Config = None, json: Json = False) -> int:
    """List all keys with when they were last used, to the minute."""
    from services.cli.output import print_json, print_table
    from services.operator import keys
    from services.operator.place import settings_of

    with _reported():
        found = keys.listed(settings_of(config))
    if json:
        print_json([{field: getattr(key, field) for field in key.__struct_fields__} for key in found])
        return 0
    rows = [
        (
            key.id,
            f"{key.hint}…",
            key.organization,
            key.role,
            key.name,
            "settings" if key.source == "settings" else _minute(key.created_at_ms),
            _minute(key.last_used_at_ms),
            _minute(key.revoked_at_ms),
        )
        for key in found
    ]
    print_table(["ID", "KEY", "ORGANIZATION", "ROLE", "NAME", "CREATED", "LAST USED", "REVOKED"], rows)
    return 0


def revoke(
    key_id: Annotated[str, Parameter(help="As `keys list` shows it: key_…")], /, *, config: Config = None
) -> int:
    """Make a key good for nothing, at once and for good."""
    from services.cli.output import say
    from services.operator import keys
    from services.operator.place import settings_of

    with _reported():
        key = keys.revoke(settings_of(config), key_id)
    say(f"{key.id} of {key.organization} " + ("was revoked already" if key.revoked_at_ms else "is revoked"))
    return 0


def audit(
    batch: Annotated[str, Parameter(help="A batch of any organization: batch_…")],
    /,
    *,
    config: Config = None,
    json: Json = False,
) -> int:
    """Prove that a finished batch is right; of a running one, tell where its records are.

    A finished batch is good when each record of its input is in exactly one line of one file, in order and
    under its own custom_id; files, counts and hashes are those that were published; and the usage of its
    lines is that of the batch object and of ClickHouse. Where a result file was deleted or has expired, it
    agrees when everything but the lines does. Exit status 1 when something is wrong, or when
    records are stuck.
    """
    import msgspec

    from services.cli.output import print_json
    from services.operator.audit import audit as examine
    from services.operator.place import settings_of
    from services.operator.telling import lines

    with _reported():
        report = examine(settings_of(config), batch)
    if json:
        print_json(msgspec.to_builtins(report))
    else:
        print("\n".join(lines(report)))
    return 0 if report.good else 1


def lag(*, config: Config = None, json: Json = False) -> int:
    """Show how far each consumer group is behind, partition by partition."""
    import msgspec

    from services.cli.output import print_json, print_table
    from services.operator.place import settings_of
    from services.operator.waiting import waiting

    with _reported():
        rows = waiting(settings_of(config))
    if json:
        print_json(msgspec.to_builtins(rows))
        return 0
    names = ["GROUP", "TOPIC", "PARTITION", "COMMITTED", "END", "LAG", "OLDEST WAITS"]
    print_table(
        names,
        [
            (
                row.group,
                row.topic,
                row.partition,
                "" if row.committed < 0 else row.committed,
                row.end,
                row.lag,
                "" if row.oldest_s is None else f"{row.oldest_s:.1f} s",
            )
            for row in rows
        ],
    )
    return 0


@contextmanager
def _reported() -> Iterator[None]:
    """What the operator can put right is said in one line."""
    from clickhouse_connect.driver.exceptions import ClickHouseError

    from services.operator.audit import NoSuchBatch
    from services.operator.keys import KeyRefused
    from streams.kafka.messages import KafkaFailed

    try:
        yield
    except (KeyRefused, NoSuchBatch) as error:
        raise CannotStart(str(error)) from error
    except ClickHouseError as error:
        raise CannotStart(f"ClickHouse: {str(error).splitlines()[0]}") from error
    except KafkaFailed as error:
        raise CannotStart(f"Kafka does not answer; does it run where the settings say? {error}") from error


def _minute(at_ms: int | None) -> str:
    return "" if at_ms is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at_ms / 1000))
