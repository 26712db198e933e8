"""TCP ports of this machine: whether one is free, and which is."""

import errno
import random
import socket
from itertools import islice

from pronghorn.errors import ConfigurationError

UNCLAIMED = range(20_000, 30_000)
"""Where a port is drawn: below those that a kernel gives to outgoing connections by itself (Linux from 32768, macOS
from 49152), between those of Ray's workers (10002 to 19999) and of Serve's replicas (from 30000). A port of the
kernel's range that is free now is another connection's source a moment later, and a client that keeps asking for a
server that is down can even be given that server's port and reach itself."""


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listened on a moment ago at any address of the host's family, outside those that the kernel
    gives away by itself; whoever binds it must be ready to find it taken. Raises ConfigurationError where none is."""
    return free_ports(1, set(), host)[0]


def free_ports(count: int, besides: set[int], host: str = "127.0.0.1") -> list[int]:
    """So many different ones, none of them in `besides`. Raises ConfigurationError where there are not so many."""
    anywhere = "::" if ":" in host else "0.0.0.0"
    drawn = random.sample(UNCLAIMED, len(UNCLAIMED))
    found = list(islice((port for port in drawn if port not in besides and is_free(anywhere, port)), count))
    if len(found) < count:
        raise ConfigurationError(
            f"of the ports from {UNCLAIMED[0]} to {UNCLAIMED[-1]}, where {count} are wanted, {len(found)} are free"
        )
    return found


def is_free(host: str, port: int) -> bool:
    try:
        require_free(host, port, "")
    except ConfigurationError:
        return False
    return True


def require_free(host: str, port: int, option: str) -> None:
    """Raises ConfigurationError, naming `option`, where nothing could listen on that address."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigurationError(
                    f"port {port} on {host} is in use by another program; choose another with {option}"
                ) from None
            raise ConfigurationError(f"nothing can listen on {host}:{port} ({error.strerror}); see {option}") from None
