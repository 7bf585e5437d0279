"""Which addresses tools and workflow callbacks may be reached at.

The standard library's `is_global` lets several forms through that lead back inside (6to4, NAT64, IPv4
compatible, site-local, multicast), so the table is our own: IPv4 lists what is refused, IPv6 allows global
unicast only and lists what is refused inside it. Forms that carry an IPv4 address inside an IPv6 one are
refused as a whole. An operator may allow ranges; those are looked at first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)

MAX_LABEL = 63
"""Characters between two dots of a name."""

_DECIMAL = re.compile(r"(?:0|[1-9][0-9]{0,2})(?:\.(?:0|[1-9][0-9]{0,2})){3}")

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_REFUSED_V4 = tuple(
    map(
        IPv4Network,
        (
            "0.0.0.0/8",
            "10.0.0.0/8",
            "100.64.0.0/10",  # carrier NAT; one cloud keeps its metadata service here
            "127.0.0.0/8",
            "168.63.129.16/32",  # a cloud's host agent, on a public address
            "169.254.0.0/16",  # link-local, metadata services
            "172.16.0.0/12",
            "192.0.0.0/24",
            "192.0.2.0/24",
            "192.88.99.0/24",
            "192.168.0.0/16",
            "198.18.0.0/15",
            "198.51.100.0/24",
            "203.0.113.0/24",
            "224.0.0.0/4",
            "240.0.0.0/4",
        ),
    )
)
_GLOBAL_V6 = IPv6Network("2000::/3")
_REFUSED_V6 = tuple(
    map(
        IPv6Network,
        (
            "2001::/23",  # protocol assignments: Teredo, ORCHID, benchmarking
            "2001:db8::/32",
            "2002::/16",  # 6to4
            "3ffe::/16",
            "3fff::/20",
        ),
    )
)


class AddressPolicy:
    """Decides by address. `allow` are ranges the operator opened, as in `egress.allow_cidrs`."""

    def __init__(self, allow: Iterable[str] = ()) -> None:
        self._allow: tuple[Network, ...] = tuple(ip_network(cidr, strict=False) for cidr in allow)

    def permits(self, address: str | Address) -> bool:
        """Whether a connection to this address may be opened. What is not an address is refused."""
        try:
            parsed = ip_address(address) if isinstance(address, str) else address
        except ValueError:
            return False
        if isinstance(parsed, IPv6Address):
            parsed = IPv6Address(int(parsed))  # without its scope
            if parsed.ipv4_mapped is not None:
                return self._allowed(parsed) or self._allowed(parsed.ipv4_mapped)
        return self._allowed(parsed) or is_public(parsed)

    def _allowed(self, address: Address) -> bool:
        return any(address in network for network in self._allow)


def is_public(address: Address) -> bool:
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _REFUSED_V4)
    return address in _GLOBAL_V6 and not any(address in network for network in _REFUSED_V6)


def host_literal(host: str) -> Address | None:
    """The address a URL's host spells out, None for a name. Raises ValueError; it does not repeat the host.

    `[…]` is IPv6. A host whose last label is a number is IPv4, as four decimal numbers: the other spellings
    (`127.1`, `0x7f000001`, `0177.0.0.1`) mean different addresses to different readers, or none.
    """
    if host.startswith("["):
        if host.endswith("]") and "%" not in host:
            with suppress(ValueError):
                return IPv6Address(host[1:-1])
        raise ValueError("what is in brackets is an IPv6 address, without a zone")
    labels = host.removesuffix(".").split(".")
    last = labels[-1].lower()
    if last.isdigit() or last.startswith("0x"):
        if _DECIMAL.fullmatch(host) is not None:
            with suppress(ValueError):
                return IPv4Address(host)
        raise ValueError("an IPv4 address is written as four decimal numbers up to 255")
    if not all(0 < len(label) <= MAX_LABEL for label in labels):
        raise ValueError(f"each part of a name has 1 to {MAX_LABEL} characters")
    return None
