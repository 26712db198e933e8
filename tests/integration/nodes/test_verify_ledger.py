"""`verify ledger` over real nodes and a real orchestrator: clean at rest, patient with work, and told of a leftover."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from cluster.verify_ledger import Report, audit
from kvcache.hashing import seed_digest
from kvcache.memory_registry import MemoryRegistry
from orchestrator.assembly import identify, start_replica
from orchestrator.config import OrchestratorConfig
from orchestrator.ports import GenerationJob
from orchestrator.presence import Presence
from orchestrator.replica import Replica
from orchestrator.replicas import Replicas
from pronghorn.clock import SystemClock
from pronghorn.deadline import Deadline
from tests.fakes.canary_engine import SEED, canary_context
from tests.integration.nodes.rig import MODEL, PATIENCE_S, Node, Rig, at_rest, holds, prompt


class House:
    """A decode node and an orchestrator, both registered."""

    def __init__(self, rig: Rig, node: Node, replica: Replica) -> None:
        self.rig, self.node, self.replica = rig, node, replica

    async def audit(self, replicas: Callable[[], dict[int, str]] = dict) -> Report:
        return await audit(self.rig.registry, replicas, 0.0)

    def job(self, new_tokens: int) -> GenerationJob:
        deadline = Deadline.after(SystemClock().now_s(), PATIENCE_S)
        return GenerationJob(canary_context(prompt(3), new_tokens), deadline, MODEL)


@pytest.fixture
async def house(rig: Rig) -> AsyncIterator[House]:
    rig.registry = MemoryRegistry(rig.clock, new_seed=lambda: SEED)
    node, _ = await rig.decode(model_path="canary:?step_s=0.2")
    await node.shell.serve_operations()
    await node.shell.check_health()
    config = OrchestratorConfig("", "", MODEL, "", max_length=4096)
    identity = await identify("orchestrator-1", config, rig.registry)
    assert identity.seed_digest == seed_digest(SEED)
    replica = await start_replica(identity, config, rig.registry)
    presence = Presence(Replicas([replica]), identity, rig.registry, 60.0)
    await presence.start("127.0.0.1")
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not (replica.ready()[0] and await rig.registry.orchestrators.list()):  # noqa: ASYNC110  # no event
                await asyncio.sleep(0.01)
        yield House(rig, node, replica)
    finally:
        await replica.stop()
        await presence.stop()


async def test_a_cluster_at_rest_is_clean(house: House) -> None:
    report = await house.audit()
    assert (report.clean, report.at_rest, report.leftovers) == (True, True, [])
    assert set(report.held) == {"decode-1", "orchestrator-1"}


async def test_a_request_that_runs_is_work_and_no_leftover(house: House) -> None:
    async with house.replica.generate(house.job(2000)):
        report = await house.audit()
        assert (report.clean, report.at_rest, report.leftovers) == (False, False, [])
        assert report.held["orchestrator-1"]["dispatched"] == report.held["decode-1"]["attempt"] == 1
    await at_rest(house.node)
    assert (await house.audit()).clean


async def test_an_attempt_that_its_orchestrator_has_forgotten_is_named(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(house.replica.membership, "send", _but_aborts(house.replica))
    async with house.replica.generate(house.job(2000)):
        await holds(house.node)
    report = await house.audit()
    assert not report.clean
    assert {(left.process, left.what) for left in report.leftovers} == {("decode-1", "attempt")}


async def test_a_process_without_a_row_is_named(house: House) -> None:
    report = await house.audit(lambda: {1: "ServeReplica:pronghorn:decode"})
    assert [(left.what, left.owner) for left in report.leftovers] == [("process", "1")]


def _but_aborts(replica: Replica) -> Callable[..., None]:
    send = replica.membership.send

    def forgetful(incarnation: object, frame: object) -> None:
        if type(frame).__name__ != "Abort":
            send(incarnation, frame)  # type: ignore[arg-type]  # passed on as it came

    return forgetful
