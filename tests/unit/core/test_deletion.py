"""Of a use and a deletion of one file the first counts."""

from __future__ import annotations

import itertools

import pytest

from streams.core.deletion import holds


@pytest.mark.parametrize(
    ("seen", "uses", "counts"),
    [
        (5, [], True),
        (5, [4], True),
        (5, [5], False),
        (5, [8], False),
        (5, [10], True),
        (5, [2, 8, 11], False),
        (None, [8], True),
    ],
)
def test_a_deletion_at_offset_nine(seen: int | None, uses: list[int], counts: bool) -> None:
    assert holds(seen, 9, uses) is counts


def test_in_no_order_do_a_create_and_a_delete_both_succeed() -> None:
    """The create appends its use and looks for a deletion; the delete looks for uses and appends itself."""
    for order in set(itertools.permutations(("use", "confirm", "look", "delete"))):
        if order.index("use") > order.index("confirm") or order.index("look") > order.index("delete"):
            continue
        used: list[int] = []
        deleted = refused = confirmed = False
        seen = 0
        for offset, step in enumerate(order):
            match step:
                case "use":
                    used.append(offset)
                case "confirm":
                    confirmed = not deleted
                case "look":
                    seen, refused = offset, bool(used)
                case "delete":
                    deleted = not refused and holds(seen, offset, used)
        assert confirmed is not deleted, order
