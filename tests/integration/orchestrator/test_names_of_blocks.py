"""The names that a router looks blocks up by are those that engines give them, salts included."""

import numpy as np
import pytest

from orchestrator.prompt_keys import PromptKeys
from tests.fakes.canary_engine import SEED
from tests.fakes.canary_pipeline import canary_layout
from tests.integration.nodes.rig import MODEL, Rig, new_rig, prompt

__all__ = ["Rig"]


@pytest.mark.field("TensorRT-LLM#18156")
@pytest.mark.parametrize("salt", [None, "tenant-a"])
@pytest.mark.parametrize("algo", ["sha256", "sha256_64", "ahash64"])
async def test_a_router_names_the_blocks_that_a_node_tells_of(salt: str | None, algo: str) -> None:
    keys = PromptKeys(algo, SEED, MODEL)  # type: ignore[arg-type]  # one of its three
    keys.learn(canary_layout(4))
    async with new_rig() as rig:
        node, _ = await rig.decode(hash_algo=algo)
        orchestrator = await rig.orchestrator(node)
        await orchestrator.result(await orchestrator.submit(prompt(5), 1, salt=salt))
        named = keys.blocks(np.array(prompt(5)), salt).keys
        expected = {named[i : i + 8] for i in range(0, len(named), 8)}
        await orchestrator.until(lambda: bool(expected) and orchestrator.cached_keys() >= expected)
