import socket
from collections.abc import Iterator

import pytest

from cluster.config_problems import redacted
from cluster.launch import choose_edge
from cluster.ports import free_port, is_free, require_free
from pronghorn.errors import ConfigurationError


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


def test_haproxy_is_taken_where_it_runs() -> None:
    assert choose_edge("auto", lambda: "HAProxy version 2.8") == "haproxy"


def test_serve_proxy_is_taken_where_haproxy_does_not_run() -> None:
    assert choose_edge("auto", lambda: None) == "serve"
    with pytest.raises(ConfigurationError, match="HAProxy cannot run"):
        choose_edge("haproxy", lambda: None)


def test_serve_proxy_may_be_asked_for() -> None:
    assert choose_edge("serve", lambda: "HAProxy version 2.8") == "serve"


def test_a_taken_port_is_refused_with_the_option_that_changes_it(taken_port: int) -> None:
    assert not is_free("127.0.0.1", taken_port)
    with pytest.raises(ConfigurationError, match=f"port {taken_port} .* in use .* --port"):
        require_free("127.0.0.1", taken_port, "--port")


def test_a_free_port_is_free() -> None:
    assert is_free("127.0.0.1", free_port())


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="nothing can listen on 192.0.2.1"):
        require_free("192.0.2.1", 8000, "--host")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:secret@127.0.0.1:1/0", "redis://127.0.0.1:1/0"),
        ("redis://me:secret@host:1/0", "redis://host:1/0"),
        ("redis://host:1/0", "redis://host:1/0"),
    ],
)
def test_passwords_are_not_shown(url: str, shown: str) -> None:
    assert redacted(url) == shown
