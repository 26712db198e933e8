from pathlib import Path

import pytest

from cluster.config import ClusterConfig, ServiceConfig
from cluster.config_problems import redacted
from cluster.launch import choose_edge, with_model
from cluster.model_config import ModelConfig
from cluster.preconditions import require_memory
from pronghorn.errors import ConfigurationError


def test_haproxy_is_taken_where_it_runs() -> None:
    assert choose_edge("auto", lambda: "HAProxy version 2.8") == "haproxy"


def test_serve_proxy_is_taken_where_haproxy_does_not_run() -> None:
    assert choose_edge("auto", lambda: None) == "serve"
    with pytest.raises(ConfigurationError, match="HAProxy cannot run"):
        choose_edge("haproxy", lambda: None)


def test_serve_proxy_may_be_asked_for() -> None:
    assert choose_edge("serve", lambda: "HAProxy version 2.8") == "serve"


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


TWO = ServiceConfig(
    model_path="",
    model_name="",
    models={"a": ModelConfig(path="a-spec"), "b": ModelConfig(path="b-spec", kv_memory_bytes=1 << 20)},
    redis_url="r",
    key_prefix="k",
    prefill=1,
    decode=2,
    kv_memory_bytes=1 << 30,
)


def test_every_model_is_found_and_checked_and_the_one_at_fault_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checked: list[tuple[str, str]] = []

    def engines(service: ServiceConfig) -> None:
        checked.append((service.model_name, service.model_path))
        if service.model_name == "b":
            raise ConfigurationError("too few blocks")

    monkeypatch.setattr("cluster.launch.find", lambda spec, *_: tmp_path / spec)
    monkeypatch.setattr("cluster.launch.config.node", engines)
    with pytest.raises(ConfigurationError, match="model 'b': too few blocks"):
        with_model(ClusterConfig(service=TWO), lambda _: None)
    assert checked == [("a", str(tmp_path / "a-spec")), ("b", str(tmp_path / "b-spec"))]
    monkeypatch.setattr("cluster.launch.config.node", lambda _: None)
    found = with_model(ClusterConfig(service=TWO), lambda _: None).service
    assert [one.model_path for one in found.each] == [str(tmp_path / "a-spec"), str(tmp_path / "b-spec")]


def test_memory_is_reckoned_over_the_pools_of_every_model() -> None:
    wanted = ClusterConfig(service=TWO)
    require_memory(wanted, 3 * ((1 << 30) + (1 << 20)))
    with pytest.raises(ConfigurationError, match="the KV pools of 6 nodes ask for 3075 MiB and 3074 MiB"):
        require_memory(wanted, 3 * ((1 << 30) + (1 << 20)) - 1)
