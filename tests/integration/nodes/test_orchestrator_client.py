"""The orchestrator's own client against a real node: both ends of the session agree."""

from orchestrator.node_client import GrpcNodeClient
from pipelines.types.frames import Heartbeat, Outputs, Submit
from pronghorn.ids import Fence
from tests.fakes.canary_engine import canary_context
from tests.fakes.canary_pipeline import continuation
from tests.integration.nodes.rig import Rig, orchestrator_identity, prompt, target


async def test_the_orchestrators_client_gets_beats_and_tokens(rig: Rig) -> None:
    prefill, _ = await rig.prefill()
    decode, _ = await rig.decode()
    client = GrpcNodeClient(decode.shell.record(), orchestrator_identity(), 5.0, 16)
    await client.connect()
    context = canary_context(prompt(3), 8)
    fence = Fence(context.request_id, 1, decode.shell.incarnation)
    client.send(Submit(fence, context, 10.0, [target(prefill)]))
    tokens: list[int] = []
    beats = 0
    async for frame in client.frames():
        match frame:
            case Heartbeat(report=report):
                beats += 1
                assert report.name == "decode-1"
            case Outputs(deltas=deltas, failures=failures):
                assert not failures
                tokens += [token for delta in deltas for token in delta.tokens]
                if deltas and deltas[-1].status.is_done:
                    break
    assert tokens == continuation(prompt(3), 8) and beats >= 1
    await client.close()
