"""What holds for every test: the layers that a test may touch follow from the folder it lies in."""

import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

TESTS = Path(__file__).parent
ROOT = TESTS.parent
WITH_RAY = "tests/integration/cluster/"

hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")  # its own deadline takes a busy machine for a fault

# `tests.fakes` is imported by name; with import mode `importlib` nothing else puts the root there.
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


def _refuse(what: str, instead: str) -> object:
    def refused(*_args: object, **_kwargs: object) -> None:
        raise AssertionError(f"a test under tests/unit {what}; {instead}")

    return refused


class ByFile(LoadScopeScheduling):
    """Which tests stay in one process where the suite runs in several: those of a file, and all those that start Ray,
    so that there is one real cluster, and one thing at a time is done to it. (`--dist loadgroup` groups nothing
    together with pytest 9.2, which does not read the name that it writes.)"""

    def _split_scope(self, nodeid: str) -> str:
        return WITH_RAY if nodeid.startswith(WITH_RAY) else nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    return ByFile(config, log)


@pytest.fixture(autouse=True)
def _unit_tests_stay_pure(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing under tests/unit starts Ray, opens a socket to anywhere, or serves gRPC."""
    if (TESTS / "unit") in request.path.parents:
        import socket

        monkeypatch.setattr(socket.socket, "connect", _refuse("connects a socket", "use a fake of the port"))
        if "ray" in sys.modules:
            monkeypatch.setattr("ray.init", _refuse("starts Ray", "it belongs in tests/integration"))
        if "grpc.aio" in sys.modules:
            monkeypatch.setattr("grpc.aio.server", _refuse("serves gRPC", "it belongs in tests/integration"))
    yield
