from typing import Any

import msgspec
import pytest

from cluster.config import MEBIBYTE
from cluster.doctor import CHECKS, Facts, HostFacts, MachineFacts, RayFacts, RedisFacts, diagnose

HOST = HostFacts(python=(3, 11, 2), system="Linux x86_64", torch="2.13.0+cpu")
REDIS = RedisFacts(url="redis://r", version="7.2.4", eviction="noeviction")
ONE = MachineFacts(address="10.0.0.1", python="3.11.2", ray="2.60.0", torch="2.13.0", clock_skew_s=0.0)
TWO = msgspec.structs.replace(ONE, address="10.0.0.2")
RAY = RayFacts(address="10.0.0.1:6379", ray="2.60.0", machines=[ONE, TWO])


def host(**changes: Any) -> Facts:
    return Facts(host=msgspec.structs.replace(HOST, **changes))


def redis(**changes: Any) -> Facts:
    return Facts(host=HOST, redis=msgspec.structs.replace(REDIS, **changes))


def ray(**changes: Any) -> Facts:
    return Facts(host=HOST, redis=REDIS, ray=msgspec.structs.replace(RAY, **changes))


def second(**changes: Any) -> Facts:
    return ray(machines=[ONE, msgspec.structs.replace(TWO, **changes)])


def test_a_sound_cluster_is_left_in_peace() -> None:
    assert diagnose(Facts(host=HOST, redis=REDIS, ray=RAY)) == []
    assert diagnose(host()) == []


@pytest.mark.parametrize(
    ("facts", "check", "level", "said"),
    [
        (host(python=(3, 9, 1)), "python", "error", "Python is 3.9.1; 3.11 is needed"),
        (host(torch=None), "torch", "error", "torch cannot be imported"),
        (host(device="cuda", gpus=1), "torch", "error", "2.13.0+cpu is a build for CPUs"),
        (host(device="cuda", cuda_build=True), "torch", "error", "no GPU"),
        (host(gpus=2, cuda_build=True), "torch", "warning", "2 GPUs are here"),
        (
            host(nodes=2, pools_bytes=1024 * MEBIBYTE, available_bytes=1000 * MEBIBYTE),
            "memory",
            "error",
            "2 nodes ask for 1024 MiB and 1000 MiB",
        ),
        (host(shared_bytes=MEBIBYTE), "shared_memory", "error", "/dev/shm has 1 MiB free"),
        (host(taken_ports={"--port": 8000}), "ports", "error", "port 8000 is in use"),
        (host(haproxy=False), "edge", "warning", "HAProxy does not run"),
        (host(redis_binary=False), "redis", "error", "no Redis server"),
        (redis(error="Connection refused"), "redis", "error", "cannot be reached at redis://r: Connection refused"),
        (redis(version="5.0.1"), "redis", "error", "is 5.0.1; 6.2 is needed"),
        (redis(eviction="allkeys-lru"), "redis", "error", "evicts keys when it is full (allkeys-lru)"),
        (redis(eviction=None), "redis", "warning", "does not tell its eviction policy"),
        (redis(clock_skew_s=-3.0), "redis", "warning", "the clock of Redis at redis://r is 3.0 s behind"),
        (ray(error="no Ray cluster answers"), "ray", "error", "no Ray cluster answers"),
        (ray(dead=["10.0.0.3"]), "ray", "warning", "10.0.0.3 is dead"),
        (ray(silent=["10.0.0.3"]), "ray", "error", "10.0.0.3 nothing could be run"),
        (second(ray="2.59.0"), "ray", "error", "10.0.0.2 has Ray 2.59.0, this host 2.60.0"),
        (second(python="3.12.1"), "ray", "error", "10.0.0.2 has Python 3.12.1"),
        (second(torch=None), "ray", "warning", "10.0.0.2 has torch None"),
        (second(clock_skew_s=2.5), "ray", "warning", "the clock of 10.0.0.2 is 2.5 s ahead of"),
        (second(unreachable=["10.0.0.1"]), "ray", "error", "10.0.0.1 cannot be reached from 10.0.0.2"),
    ],
)
def test_each_fault_is_named_and_has_a_remedy(facts: Facts, check: str, level: str, said: str) -> None:
    (finding,) = diagnose(facts)
    assert (finding.check, finding.level) == (check, level)
    assert said in finding.what
    assert finding.remedy


def test_one_fault_hides_no_other() -> None:
    everything = Facts(
        host=msgspec.structs.replace(HOST, python=(3, 9, 1), torch=None, shared_bytes=0, taken_ports={"--port": 1}),
        redis=msgspec.structs.replace(REDIS, eviction="volatile-ttl", clock_skew_s=9.0),
        ray=msgspec.structs.replace(RAY, dead=["a"], silent=["b"]),
    )
    assert len(diagnose(everything)) == 8
    assert {finding.check for finding in diagnose(everything)} <= {check.__name__ for check in CHECKS}
