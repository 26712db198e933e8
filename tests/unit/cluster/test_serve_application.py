import warnings
from typing import Any

import msgspec
import pytest

from cluster.config import APPLICATION_NAME, ClusterConfig, ServiceConfig
from pronghorn.errors import ConfigurationError

with warnings.catch_warnings():  # Ray's modules warn of their own ways when they are imported
    warnings.simplefilter("ignore")
    from ray._private.utils import check_version_info
    from ray.serve.config import HTTPOptions

    from cluster.serve_application import ServeApplication, require_room

CONFIG = ClusterConfig(
    name="c",
    service=ServiceConfig(model_path="/m", model_name="m", redis_url="redis://r", key_prefix="k"),
    port=8000,
    address="10.0.0.1:6379",
)


def test_another_version_of_ray_is_named_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def answered(**_: Any) -> None:
        check_version_info({"ray_version": "2.9.0", "python_version": "3.11.7"}, "10.0.0.2")

    monkeypatch.setattr("ray.init", answered)
    with pytest.raises(ConfigurationError) as refused:
        ServeApplication("10.0.0.1:6379", CONFIG)
    assert "10.0.0.1:6379" in refused.value.message
    assert "2.9.0" in refused.value.message
    assert "2.60" in refused.value.message
    assert "\n" not in refused.value.message


def test_a_ray_cluster_that_does_not_answer_is_named_and_the_token_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def unanswered(**_: Any) -> None:
        raise ConnectionError("Failed to connect")

    monkeypatch.setattr("ray.init", unanswered)
    with pytest.raises(ConfigurationError, match=r"at 10\.0\.0\.1:6379.*RAY_AUTH_TOKEN_PATH"):
        ServeApplication("10.0.0.1:6379", CONFIG)


def test_what_others_deployed_is_not_displaced() -> None:
    with pytest.raises(ConfigurationError, match="already has alpha, beta"):
        require_room("there", CONFIG, HTTPOptions(host="127.0.0.1", port=8000), ["beta", "alpha"])


def test_a_serve_that_listens_elsewhere_is_refused_with_what_to_give() -> None:
    with pytest.raises(ConfigurationError, match=r"give --host 0\.0\.0\.0 --port 80$"):
        require_room("there", CONFIG, HTTPOptions(host="0.0.0.0", port=80), [])


def test_a_serve_without_applications_on_the_same_port_is_used() -> None:
    require_room("there", CONFIG, HTTPOptions(host="127.0.0.1", port=8000), [])


class Controller:
    """Serve with one application, deployed with these arguments."""

    def __init__(self, args: dict[str, Any]) -> None:
        self._args = args

    def get_serve_details(self) -> dict[str, Any]:
        return {"applications": {APPLICATION_NAME: {"deployed_app_config": {"args": self._args}}}}


@pytest.mark.parametrize(
    ("changes", "ours"),
    [({}, True), ({"revision": 3}, True), ({"key_prefix": "another"}, False), ({"model_path": "/another"}, False)],
)
def test_what_was_redeployed_is_still_ours_to_withdraw(changes: dict[str, Any], ours: bool) -> None:
    application = object.__new__(ServeApplication)
    application._config = CONFIG
    args = msgspec.to_builtins(CONFIG.service) | changes
    assert application._is_deployed(Controller(args)) is ours  # type: ignore[arg-type]  # all of it that is asked


def test_only_a_ray_cluster_of_others_is_shown_the_redis_url() -> None:
    application = object.__new__(ServeApplication)
    application._config = CONFIG
    assert application._args()["redis_url"] == "redis://r"
    application._config = msgspec.structs.replace(CONFIG, address=None)
    assert application._args()["redis_url"] == ""
