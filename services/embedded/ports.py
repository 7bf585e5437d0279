"""Ports on 127.0.0.1."""

import random
import socket

FIRST, LAST = 16_384, 32_767
"""Below those that systems give to outgoing connections, one of which could take a port between its choice
and its use, or while the process that had it is started again."""

TRIES = 100


def free_port() -> int:
    """A port that nobody listens on now."""
    for port in random.SystemRandom().sample(range(FIRST, LAST + 1), TRIES):
        if is_free(port):
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Whether a server could listen on it now (connections in their closing time do not count)."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
