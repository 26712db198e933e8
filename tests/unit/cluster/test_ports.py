import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import ports
from cluster.ports import free_port, free_ports, is_free, require_free
from pronghorn.errors import ConfigurationError


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


def test_a_taken_port_is_refused_with_the_option_that_changes_it(taken_port: int) -> None:
    assert not is_free("127.0.0.1", taken_port)
    with pytest.raises(ConfigurationError, match=f"port {taken_port} .* in use .* --port"):
        require_free("127.0.0.1", taken_port, "--port")


def test_a_free_port_is_free() -> None:
    assert is_free("127.0.0.1", free_port())


def test_a_free_port_is_none_that_the_kernel_gives_to_outgoing_connections() -> None:
    """It is bound some seconds later: by then any port of that range can be the source of somebody's connection."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(free_ports(20, set())) < lowest


def test_a_port_taken_at_another_address_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """HAProxy listens on every address of the machine."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.5", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        monkeypatch.setattr(ports, "UNCLAIMED", range(taken, taken + 1))
        with pytest.raises(ConfigurationError, match="where 1 are wanted, 0 are free"):
            free_port()


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="nothing can listen on 192.0.2.1"):
        require_free("192.0.2.1", 8000, "--host")
