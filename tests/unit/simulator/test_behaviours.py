"""What the first words of a prompt ask for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.simulator.behaviours import ORDINARY, Behaviour, parse


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ORDINARY),
        ("Name three primary colors.", ORDINARY),
        ("ok", ORDINARY),
        ("slow:1.5 record 7", Behaviour(slow_s=1.5)),
        ("slow:x", ORDINARY),
        ("slow:-1", ORDINARY),
        ("slow:nan", ORDINARY),
        ("status:500", Behaviour(fault="status", status=500)),
        ("status:500:2 a", Behaviour(fault="status", status=500, times=2)),
        ("status:999", ORDINARY),
        ("retry-after:0.5:3", Behaviour(fault="status", status=429, retry_after_s=0.5, times=3)),
        ("retry-after:5", ORDINARY),
        ("hang", Behaviour(fault="hang")),
        ("hang on, what is this?", Behaviour(fault="hang")),
        ("Hang", ORDINARY),
        ("half:1", Behaviour(fault="half", times=1)),
        ("drip:0.1", Behaviour(fault="drip", pause_s=0.1)),
        ("drip:0.1:3", ORDINARY),
        ("usage:null", Behaviour(usage="null")),
        ("usage:10/20/3/4", Behaviour(usage="10/20/3/4")),
        ("usage:many", ORDINARY),
        ("big:10", Behaviour(content_bytes=10)),
        ("big:999999999999", ORDINARY),
        ("tools:2", Behaviour(rounds=2)),
        ("tools:2:3 args:notjson x", Behaviour(rounds=2, calls=3, arguments="notjson")),
        ("slow:1\n\tusage:missing", Behaviour(slow_s=1, usage="missing")),
        ("ok slow:1 then slow:2", Behaviour(slow_s=1)),
        ('json:{"a": 1e2,  "b": "x y"}', Behaviour(fault="json", body='{"a": 1e2,  "b": "x y"}')),
        ("drop:1 status:500", Behaviour(fault="status", status=500)),
        ("drop:1 gzip", Behaviour(fault="gzip")),
    ],
)
def test_words(text: str, expected: Behaviour) -> None:
    assert parse(text) == expected


def test_words_after_at_hold_in_their_round_only() -> None:
    text = "tools:3 at:1 status:500 at:2 slow:2 label"
    assert parse(text, 0) == Behaviour(rounds=3)
    assert parse(text, 1) == Behaviour(rounds=3, fault="status", status=500)
    assert parse(text, 2) == Behaviour(rounds=3, slow_s=2)
    assert parse("at:1 json:{}", 0) == ORDINARY
    assert parse("at:1 json:{}", 1) == Behaviour(fault="json", body="{}")
    assert parse("at:x drop") == ORDINARY


@given(st.text())
def test_any_prompt_has_a_behaviour(text: str) -> None:
    parse(text)


@given(st.text(alphabet="abcdefghijklmnopqrstuvwxyz:0123456789 .-/"))
def test_any_words_have_a_behaviour(text: str) -> None:
    for word in ("slow:", "status:", "tools:", "usage:", "json:", "at:"):
        parse(word + text)
