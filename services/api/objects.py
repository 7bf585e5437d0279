"""Objects only this host sends."""

from __future__ import annotations

import msgspec


class ModelObject(msgspec.Struct, frozen=True):
    id: str
    created: int = 0
    owned_by: str = "openrelay"
    object: str = "model"


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelObject]
    object: str = "list"
