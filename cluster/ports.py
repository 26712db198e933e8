"""TCP ports of this machine: whether one is free, and which is."""

import errno
import socket

from pronghorn.errors import ConfigurationError


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago; whoever binds it must be ready to find it taken."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def free_ports(count: int, besides: set[int]) -> list[int]:
    """So many different ones, none of them in `besides`."""
    found: list[int] = []
    while len(found) < count:
        port = free_port()
        if port not in besides and port not in found:
            found.append(port)
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
