"""One known prompt, and what it is called by the engine that caches it, the directory, the feed of events and the
router: literal values, since a router of one version meets nodes of another, and Redis outlives both."""

from typing import get_args

import numpy as np
import pytest

from kvcache.directory import KEY_BYTES
from kvcache.hashing import BlockHasher, HashAlgo, index_keys, pack_tokens
from kvcache.memory_directory import MemoryDirectory
from kvcache.prefix_cache import PrefixCache
from orchestrator.holdings import Holdings
from orchestrator.prompt_keys import PromptKeys
from pipelines.node.block_feed import events_of
from pipelines.types.frames import BlockEvents, BlocksStored
from pronghorn.clock import SystemClock
from pronghorn.counters import Counters
from pronghorn.ids import Incarnation, NodeName

NODE = Incarnation("life")
SEED = bytes(range(32))
LAYOUT = {
    **{"block_tokens": "4", "dtype": "float32", "head_dim": "8", "num_kv_heads": "2", "num_layers": "3"},
    "model_id": "smol",
}
PROMPT = np.array([5, 6, 7, 8, 100_000, 0, 1, 2, 9, 9, 9], np.int64)
GOLDEN = {
    ("sha256", None): [
        "f932d14d6bdb86e0193e764529d5b5ac2c9d0cd30aa4575f5811a025ebee74a9",
        "b3dcc46b636bf3c4fddcdedb17c6c249f3ae748d83e3aaf2f40a78f8c564a987",
    ],
    ("sha256", "tenant é"): [
        "172209a4417218ba6914236a6b1f5ba38e09f284aacc5ebff0d2ad28a11aa527",
        "05144d83bd868f6fdd2d0ee43f23bff5c7b234e48b0e61b8ebc4df6ada7f0ab0",
    ],
    ("sha256_64", None): [
        "f932d14d6bdb86e0193e764529d5b5ac2c9d0cd30aa4575f5811a025ebee74a9",
        "b3dcc46b636bf3c4fddcdedb17c6c249f3ae748d83e3aaf2f40a78f8c564a987",
    ],
    ("sha256_64", "tenant é"): [
        "172209a4417218ba6914236a6b1f5ba38e09f284aacc5ebff0d2ad28a11aa527",
        "05144d83bd868f6fdd2d0ee43f23bff5c7b234e48b0e61b8ebc4df6ada7f0ab0",
    ],
    ("ahash64", None): [
        "ea93d733fd77cecd",
        "f2cf8221f6af3ee8",
    ],
    ("ahash64", "tenant é"): [
        "ea93d733fd77cecd",
        "f2cf8221f6af3ee8",
    ],
}
CASES = pytest.mark.parametrize(("algo", "salt"), GOLDEN, ids=lambda value: str(value))
ADAPTED = {
    ("sha256", None): [
        "ad8c92a614c9b2626f0970c790d43e7933dd6a3dbbf3bd64c0ad0b96a68acec7",
        "cf0f4cc07f59ef4404c3763a791b719f6f9ff0a999344ef0f978d953baf282a3",
    ],
    ("sha256", "tenant"): [
        "d087e02dcfd4fcff128b72893eedc78b861b90fed4c74cc51b053764fc003808",
        "aa633a761d6dfd4c028a15426fd8f826587002c7b35a24ad639440c82f4c1583",
    ],
    ("ahash64", None): [
        "8c20037609c20edd",
        "47c01b52274a8a07",
    ],
    ("ahash64", "tenant"): [
        "8c20037609c20edd",
        "47c01b52274a8a07",
    ],
}


@pytest.mark.field("TensorRT-LLM#18156")
@CASES
async def test_engine_directory_events_and_router_call_a_prompts_blocks_the_same(algo: str, salt: str | None) -> None:
    digests = [bytes.fromhex(digest) for digest in GOLDEN[algo, salt]]
    keys = b"".join(digest[:8] for digest in digests)

    hasher = BlockHasher(algo, SEED, "smol", None, LAYOUT)  # type: ignore[arg-type]  # one of its three
    cache = PrefixCache(8, hasher)
    cache.claim("owner", hasher.root(salt))
    cache.match("owner", PROMPT)
    cache.reserve("owner", len(PROMPT))
    cache.commit("owner", PROMPT, len(PROMPT))
    changes = cache.journal.take()
    (run,) = changes
    assert run.hashes == digests

    (event,) = events_of(changes)
    assert event == BlocksStored(None, keys)

    directory = MemoryDirectory(SystemClock())
    await directory.open(NodeName("node"), Incarnation("life"), 1.0)
    await directory.stored(NodeName("node"), Incarnation("life"), run.hashes)
    assert [rows async for rows in directory.rows()] == [("life", [digest[:KEY_BYTES] for digest in digests])]

    router = PromptKeys(algo, SEED, "smol")  # type: ignore[arg-type]  # one of its three
    router.learn(LAYOUT)
    named = router.blocks(PROMPT, salt)
    assert named.hashes == digests and named.keys == keys


@pytest.mark.field("TensorRT-LLM#18156")
@pytest.mark.parametrize(("algo", "salt"), ADAPTED, ids=lambda value: str(value))
def test_an_adapters_blocks_have_names_of_their_own(algo: HashAlgo, salt: str | None) -> None:
    hasher = BlockHasher(algo, SEED, "smol", "sql", LAYOUT)
    assert [digest.hex() for digest in hasher.chain(pack_tokens(PROMPT), hasher.root(salt))] == ADAPTED[algo, salt]


@pytest.mark.field("TensorRT-LLM#18156")
@pytest.mark.parametrize("adapter", [None, "sql"])
@pytest.mark.parametrize("salt", [None, "tenant"])
@pytest.mark.parametrize("algo", get_args(HashAlgo))
def test_a_repeated_prompt_is_a_hit_of_engine_and_index_under_its_own_salt_and_adapter_and_no_other(
    algo: HashAlgo, salt: str | None, adapter: str | None
) -> None:
    """TensorRT-LLM#18156: the router hashed salts and adapters otherwise, and nothing was ever hit."""
    hasher = BlockHasher(algo, SEED, "smol", adapter, LAYOUT)
    engine = PrefixCache(16, hasher)

    def cached_tokens(owner: str, root: bytes) -> int:
        engine.claim(owner, root)
        cached = engine.match(owner, PROMPT)
        engine.reserve(owner, len(PROMPT))
        engine.commit(owner, PROMPT, len(PROMPT))
        engine.release(owner)
        return cached

    assert [cached_tokens(owner, hasher.root(salt)) for owner in ("first", "again")] == [0, 8]
    index = Holdings(1 << 20, Counters())
    index.events(NODE, BlockEvents(1, events_of(engine.journal.take()), snapshot=True), 0.0)
    assert index.find(index_keys(hasher.chain(pack_tokens(PROMPT), hasher.root(salt)))) == {NODE: 2}

    router = PromptKeys(algo, SEED, "smol")
    router.learn(LAYOUT)
    assert index.find(router.blocks(PROMPT, salt).keys) == ({NODE: 2} if adapter is None else {})
    stranger = BlockHasher(algo, SEED, "smol", "another", LAYOUT).root(salt)
    assert cached_tokens("of another adapter", stranger) == 0
    if algo != "ahash64":  # which has no salts
        assert cached_tokens("of another salt", hasher.root("another")) == 0
        assert index.find(router.blocks(PROMPT, "another").keys) == {}
