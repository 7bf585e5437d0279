"""`orl usage` and `orl lag`: what the control host knows."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import App, Parameter

from services.cli.client import Exit
from services.cli.output import money, print_json, print_table
from services.cli.session import Json, open_control

_NUMBERS = ("requests", "input_tokens", "cached_tokens", "output_tokens")


def add_to(app: App) -> None:
    """Give `app` these commands."""
    app.command(usage)
    app.command(lag)


def usage(
    *,
    group_by: Annotated[str, Parameter(help="Comma-separated: day, month, model, batch, tier.")] = "model",
    start: Annotated[str | None, Parameter(help="First day, YYYY-MM-DD, UTC.")] = None,
    end: Annotated[str | None, Parameter(help="Last day, YYYY-MM-DD, UTC.")] = None,
    batch: Annotated[str | None, Parameter(help="One batch only.")] = None,
    organization: Annotated[str | None, Parameter(help="One organization, with a finance key.")] = None,
    json: Json = False,
) -> int:
    """Show usage and cost."""
    with open_control() as client:
        answer = client.get(
            "/v1/usage", group_by=group_by, start=start, end=end, batch=batch, organization=organization
        )
    if json:
        print_json(answer)
        return Exit.OK
    groups = [name for name in group_by.split(",") if name]
    rows = [_row(groups, row) for row in answer["data"]]
    print_table([*(name.upper() for name in (*groups, *_NUMBERS)), "COST"], rows)
    return Exit.OK


def lag(*, json: Json = False) -> int:
    """Show how far each stage is behind."""
    with open_control() as client:
        answer = client.get("/v1/lag")
    if json:
        print_json(answer)
        return Exit.OK
    rows = [(row["group"], row["topic"], row["partitions"], row["lag"]) for row in answer["data"]]
    print_table(["GROUP", "TOPIC", "PARTITIONS", "LAG"], rows)
    return Exit.OK


def _row(groups: list[str], row: dict[str, Any]) -> list[object]:
    named = [row.get(name, "") for name in groups]
    return [*named, *(row.get(name, 0) for name in _NUMBERS), money(row.get("cost_nano_usd", 0))]
