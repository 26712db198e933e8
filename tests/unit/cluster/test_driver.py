import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import driver as driver_module
from cluster.config import ClusterConfig, ServiceConfig
from cluster.driver import Driver, Joined
from pronghorn.errors import ConfigurationError
from tests.fakes.running_cluster import ROOT

CONFIG = ClusterConfig(
    name="c", service=ServiceConfig(model_path="/m", model_name="m", redis_url="redis://r", key_prefix="k")
)


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    environ = {"PATH": os.defpath, "PYTHONPATH": str(ROOT)}
    driver = Driver(tmp_path, environ, module="tests.fakes.scripted_driver")
    yield driver
    driver.stop()


def test_an_answer_comes_and_what_else_is_printed_does_not_matter(driver: Driver) -> None:
    assert driver.join("answers", CONFIG) == Joined("http://dashboard")
    said: list[str] = []
    driver.wait_until_running(1.0, said.append)
    assert said == ["half way"]


def test_a_refusal_is_raised_and_the_driver_can_be_asked_again(driver: Driver) -> None:
    with pytest.raises(ConfigurationError, match="no room"):
        driver.join("refuses", CONFIG)
    assert driver.idle
    driver.join("answers", CONFIG)


def test_its_end_fails_the_question(driver: Driver) -> None:
    with pytest.raises(ConfigurationError, match=r"has ended \(exit code 3\)"):
        driver.join("dies", CONFIG)
    assert not driver.idle


def test_silence_is_bounded(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "JOIN_TIMEOUT_S", 0.2)
    with pytest.raises(ConfigurationError, match="did not answer within 0 s"):
        driver.join("silent", CONFIG)


def test_a_question_under_way_fails_at_once_when_it_is_killed(driver: Driver) -> None:
    threading.Timer(0.2, driver.kill).start()
    began_s = time.monotonic()
    with pytest.raises(ConfigurationError, match="has ended"):
        driver.join("silent", CONFIG)
    assert time.monotonic() - began_s < driver_module.JOIN_TIMEOUT_S / 2
