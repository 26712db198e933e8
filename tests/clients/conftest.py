"""One real cluster for every client that nobody here wrote."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.fakes.running_cluster import command_line, end, start

# Before the test modules import the clients: what they would otherwise ask of the internet.
os.environ |= {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
}


@dataclass(frozen=True)
class Server:
    url: str
    model: str = "smollm2-135m-instruct"

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with command_line() as pronghorn:
        cluster = start(pronghorn, "clients", "--prefill=1", "--decode=1", "--kv-memory=192MiB")
        try:
            yield Server(cluster.url)
            cluster.wait_until_at_rest()
            cluster.assert_ledger_clean()
        finally:
            end(cluster)
