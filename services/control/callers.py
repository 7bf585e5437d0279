"""Who asks the control host, and what that caller may see."""

from __future__ import annotations

import base64
import binascii

from starlette.requests import Request

from schemas.facts import KeyRole
from services.api.principals import Principal, Principals, presented_key
from services.api.refusals import Refusal, invalid, not_found

DASHBOARD = "/"
BASIC = 'Basic realm="OpenRelay: any name, and an API key as the password", charset="UTF-8"'


def authenticate(request: Request, principals: Principals) -> Principal:
    """By `Authorization: Bearer` or `x-api-key`, at the dashboard by a password too; raises Refusal."""
    if request.scope["path"] == DASHBOARD:
        return _browser(request, principals)
    return principals.authenticate(presented_key(dict(request.headers.raw)))


def operators_only(caller: Principal) -> None:
    """For others than operators there is nothing here."""
    if caller.role is not KeyRole.OPERATOR:
        raise not_found()


def whose_usage(request: Request, caller: Principal) -> str | None:
    """Whose usage the caller may read: its own, and with a finance or operator key anyone's."""
    asked = request.query_params.get("organization")
    if caller.role is KeyRole.ORGANIZATION:
        if asked not in (None, caller.organization):
            raise not_found()
        if "organization" in request.query_params.get("group_by", "").split(","):
            raise invalid("group_by: organization needs a finance key", "group_by")
        return caller.organization
    return asked


def whose_batches(caller: Principal) -> str | None:
    """Whose batches the caller may see: its own, and with an operator key everybody's."""
    return None if caller.role is KeyRole.OPERATOR else caller.organization


def _browser(request: Request, principals: Principals) -> Principal:
    """The key may be a password; asked for it, people see a form."""
    scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
    try:
        if scheme.lower() == "basic":
            decoded = base64.b64decode(credentials, validate=True).decode()
            return principals.authenticate(decoded.partition(":")[2])
        return principals.authenticate(presented_key(dict(request.headers.raw)))
    except (binascii.Error, UnicodeDecodeError, Refusal):
        try:
            return principals.authenticate(None)
        except Refusal as refusal:
            refusal.headers["www-authenticate"] = BASIC
            raise
