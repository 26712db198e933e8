from pathlib import Path
from types import SimpleNamespace

from cluster import ray_head

LIMIT_BYTES = 107
"""Of a Unix socket's path."""
NODE_ID = "f" * 56


def environment(
    base: dict[str, str], temp_dir: Path = Path("/tmp/ph-12345678"), haproxy: bool = True
) -> dict[str, str]:
    return ray_head.environment(base, "run-1", temp_dir, Path("/run/token"), haproxy=haproxy, taken=set())


def test_another_ray_of_the_user_is_not_followed() -> None:
    made = environment({"RAY_ADDRESS": "10.0.0.1:6379", "RAY_AUTH_TOKEN": "other", "PATH": "/bin"})
    assert "RAY_ADDRESS" not in made
    assert "RAY_AUTH_TOKEN" not in made
    assert made["PATH"] == "/bin"


def test_every_process_can_be_told_to_be_of_this_run_and_holds_its_token() -> None:
    made = environment({"RAY_AUTH_MODE": "disabled"})
    assert made["PRONGHORN_RUN"] == "run-1"
    assert (made["RAY_AUTH_MODE"], made["RAY_AUTH_TOKEN_PATH"]) == ("token", "/run/token")


def test_haproxy_sockets_fit_in_a_unix_path() -> None:
    path = Path(environment({})["RAY_SERVE_HAPROXY_SOCKET_PATH"])
    while_binding = path.parent / NODE_ID / f"{path.name}.4194304.tmp"
    assert len(str(while_binding)) <= LIMIT_BYTES


def test_ports_of_haproxy_are_distinct() -> None:
    made = environment({})
    ports = [value for name, value in made.items() if name.endswith("_PORT")]
    assert len(ports) == len(set(ports)) == 3


def test_serve_proxy_is_used_where_haproxy_cannot_run() -> None:
    assert environment({}, haproxy=False)["RAY_SERVE_ENABLE_HA_PROXY"] == "0"


def test_the_client_server_is_left_out() -> None:
    params = SimpleNamespace(ray_client_server_port=10001)
    ray_head.without_client_server(params, True)
    assert params.ray_client_server_port is None


def test_the_token_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "token"
    ray_head.write_token(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(path.read_text()) == 64
