"""Mutual TLS between real nodes and an orchestrator: who is let in, who is told what, and a rotation under streams."""

from pathlib import Path

import pytest

from kvcache.registry import NodeRecord
from orchestrator.node_client import GrpcNodeClient
from pipelines.types.frames import Heartbeat
from pronghorn.credentials import Credentials, TlsFiles
from pronghorn.errors import HandshakeRefused, NodeLost
from tests.fakes.cache_hints import hint
from tests.fakes.canary_pipeline import continuation
from tests.fakes.certificates import Authority
from tests.integration.nodes.rig import Node, Rig, at_rest, orchestrator_identity, prompt, target

OURS, THEIRS = Authority("ours"), Authority("theirs")
TOKENS = prompt(20)


@pytest.fixture
def tls_rig(rig: Rig, tmp_path: Path) -> Rig:
    rig.tls = OURS.issue(tmp_path / "ours")
    return rig


def client(node: Node, files: TlsFiles | None) -> GrpcNodeClient:
    shell = node.shell
    record: NodeRecord = shell.record()
    return GrpcNodeClient(record, orchestrator_identity(), 5.0, 64, Credentials(files).channel)


async def test_nodes_and_an_orchestrator_speak_tls(tls_rig: Rig) -> None:
    prefill, _ = await tls_rig.prefill()
    decode, _ = await tls_rig.decode()
    orchestrator = await tls_rig.orchestrator(decode)
    fence = await orchestrator.submit(TOKENS, 4, target(prefill))
    assert await orchestrator.result(fence) == continuation(TOKENS, 4)
    assert decode.counters.value("pull_committed") == 1
    await at_rest(prefill, decode)


async def test_a_fetch_speaks_tls(tls_rig: Rig) -> None:
    first, _ = await tls_rig.decode("decode-1")
    second, _ = await tls_rig.decode("decode-2")
    await tls_rig.registered(first, second)
    one, other = await tls_rig.orchestrator(first), await tls_rig.orchestrator(second)
    await one.result(await one.submit(TOKENS, 4))
    fence = await other.submit([*TOKENS, 2], 4, hint=hint(TOKENS[:80], decode_1=20))
    assert await other.result(fence) == continuation([*TOKENS, 2], 4)
    assert second.counters.value("blocks_fetched") == 20


@pytest.mark.parametrize("asker", ["plaintext", "another CA"])
async def test_a_decode_node_that_is_not_of_the_cluster_gets_no_block(rig: Rig, tmp_path: Path, asker: str) -> None:
    rig.tls = OURS.issue(tmp_path / "ours")
    prefill, _ = await rig.prefill()
    rig.tls = None if asker == "plaintext" else THEIRS.issue(tmp_path / "theirs")
    decode, _ = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    fence = await orchestrator.submit(TOKENS, 4, target(prefill))
    assert await orchestrator.result(fence) == continuation(TOKENS, 4)  # computed by itself
    code = "closed_at_once" if asker == "plaintext" else "tls_refused"
    assert decode.counters.value("pull_failed", code) == 1
    assert prefill.counters.value("blocks_sent") == 0 and prefill.in_flight == 0


async def test_a_node_that_speaks_plaintext_is_refused_by_one_that_speaks_tls(rig: Rig, tmp_path: Path) -> None:
    prefill, _ = await rig.prefill()
    rig.tls = OURS.issue(tmp_path / "ours")
    decode, _ = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    fence = await orchestrator.submit(TOKENS, 4, target(prefill))
    assert await orchestrator.result(fence) == continuation(TOKENS, 4)
    assert decode.counters.value("pull_failed", "tls_refused") == 1


async def test_an_orchestrator_is_told_why_it_is_not_let_in(tls_rig: Rig, tmp_path: Path) -> None:
    node, _ = await tls_rig.decode()
    other = client(node, THEIRS.issue(tmp_path / "theirs"))
    with pytest.raises(HandshakeRefused, match="not of this cluster's CA"):
        await other.connect()
    await other.close()
    plaintext = client(node, None)
    with pytest.raises(NodeLost, match="speaks TLS alone"):
        await plaintext.connect()
    await plaintext.close()


async def test_a_certificate_for_another_name_is_refused(rig: Rig, tmp_path: Path) -> None:
    rig.tls = OURS.issue(tmp_path / "other", dns_name="somebody-else")
    node, _ = await rig.decode()
    orchestrator = client(node, OURS.issue(tmp_path / "ours"))
    with pytest.raises((HandshakeRefused, NodeLost)):
        await orchestrator.connect()
    await orchestrator.close()


async def test_a_rotation_to_another_ca_drops_no_stream_and_binds_all_that_come_after(rig: Rig, tmp_path: Path) -> None:
    folder = tmp_path / "ours"
    rig.tls = OURS.issue(folder)
    prefill, _ = await rig.prefill()
    decode, _ = await rig.decode(enable_prefix_caching=False)
    before = await rig.orchestrator(decode)
    assert await before.result(await before.submit(TOKENS, 4, target(prefill))) == continuation(TOKENS, 4)
    old = OURS.issue(tmp_path / "old")
    THEIRS.issue(folder)
    fence = await before.submit(TOKENS, 4, target(prefill))
    assert await before.result(fence) == continuation(TOKENS, 4), "its session was dropped"
    assert decode.counters.value("pull_committed") == 2 and not before.ended
    after = client(decode, THEIRS.issue(tmp_path / "new"))
    await after.connect()
    assert isinstance(await anext(after.frames()), Heartbeat)
    await after.close()
    refused = client(decode, old)
    with pytest.raises((HandshakeRefused, NodeLost)):
        await refused.connect()
    await refused.close()
    await at_rest(prefill, decode)
