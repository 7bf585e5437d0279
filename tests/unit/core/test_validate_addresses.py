"""Which addresses are public, and how a host spells one."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from streams.core.addresses import AddressPolicy, host_literal


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "172.32.0.1", "100.128.0.1", "2606:4700::1", "2a00::1"]
)
def test_public(address: str) -> None:
    assert AddressPolicy().permits(address)
    assert AddressPolicy().permits(ip_address(address))


@pytest.mark.parametrize(
    "address",
    ["::ffff:8.8.8.8", "2002:808:808::1", "64:ff9b::808:808", "fe80::1%eth0", "4000::1", "x", "", "1.2.3"],
)
def test_refused(address: str) -> None:
    assert not AddressPolicy().permits(address)


def test_allowed_ranges_come_first() -> None:
    policy = AddressPolicy(["10.1.0.0/16", "fe80::/10", "::1/128"])
    assert policy.permits("10.1.2.3")
    assert policy.permits("::ffff:10.1.2.3")
    assert policy.permits("fe80::1%eth0")
    assert policy.permits("::1")
    assert not policy.permits("10.2.0.1")
    assert not policy.permits("127.0.0.1")
    with pytest.raises(ValueError, match="does not appear to be"):
        AddressPolicy(["nonsense"])


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("1.2.3.4", "1.2.3.4"),
        ("0.0.0.0", "0.0.0.0"),
        ("[2001:DB8::1]", "2001:db8::1"),
        ("example.com", None),
        ("example.com.", None),
        ("x" * 63 + ".example", None),
        ("x1", None),
        ("1.example", None),
    ],
)
def test_host_literal(host: str, address: str | None) -> None:
    assert host_literal(host) == (None if address is None else ip_address(address))


@pytest.mark.parametrize(
    ("host", "why"),
    [
        *(
            (host, "four decimal numbers")
            for host in (
                "1.2.772",
                "127.1",
                "2130706433",
                "0x7f000001",
                "01.02.03.04",
                "0x0",
                "1.2.3.4.",
                "4294967296",
                "a.1",
                "1..1",
                "0x1.0xg",
                "1.2.3.4.5",
            )
        ),
        ("1.2.3.256", "up to 255"),
        ("[1.2.3.4]", "brackets"),
        ("[::1", "brackets"),
        (".", "1 to 63"),
        ("a..example", "1 to 63"),
        (".example", "1 to 63"),
        ("example..", "1 to 63"),
        ("x" * 64 + ".example", "1 to 63"),
    ],
)
def test_no_usable_host(host: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        host_literal(host)
    assert len(host) < 4 or host not in str(caught.value)
