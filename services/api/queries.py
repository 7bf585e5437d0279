"""Reading query parameters and small JSON bodies, naming what is wrong with them."""

from __future__ import annotations

from starlette.requests import Request

from services.api import refusals
from streams.core.strictjson import NotJson, parse


def integer(request: Request, name: str, default: int, least: int, most: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and least <= int(text) <= most):
        raise refusals.invalid(f"{name} must be an integer from {least} to {most}.", name)
    return int(text)


def choice(request: Request, name: str, *known: str) -> str:
    """One of the known values, the first by default."""
    text = request.query_params.get(name, known[0])
    if text not in known:
        raise refusals.invalid(f"{name} must be one of {', '.join(known)}.", name)
    return text


def whole(value: object) -> int | None:
    """The integer a JSON number is, `1.0` and `1e3` too; None for anything else."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def json_object(data: bytes) -> dict[str, object]:
    """A body that must be a JSON object; fields given as null count as absent."""
    try:
        value = parse(data)
    except NotJson as error:
        raise refusals.invalid(f"The body {error}.") from None
    if not isinstance(value, dict):
        raise refusals.invalid("The body must be a JSON object.")
    return {key: each for key, each in value.items() if each is not None}


def only_known(fields: dict[str, object], *known: str) -> None:
    for key in fields:
        if key not in known:
            raise refusals.invalid(f"The field {key[:64]!r} is not known.", key[:64], "unknown_parameter")
