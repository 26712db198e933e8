import numpy as np
import pytest

from kvcache.hashing import BlockHasher, pack_tokens
from kvcache.layout import KVLayout
from orchestrator.prompt_keys import DEFAULT_KV_BYTES_PER_TOKEN, PromptKeys

SEED = bytes(range(32))
LAYOUT = KVLayout(model="m", dtype="float32", block_tokens=4, num_layers=2, num_kv_heads=3, head_dim=5)
TOKENS = np.arange(1, 14, dtype=np.int64)


def known() -> PromptKeys:
    keys = PromptKeys("sha256", SEED, "m")
    keys.learn(LAYOUT.fingerprint())
    return keys


@pytest.mark.parametrize("salt", [None, "tenant"])
def test_blocks_are_called_what_the_nodes_call_them(salt: str | None) -> None:
    hasher = BlockHasher("sha256", SEED, "m", None, LAYOUT.fingerprint())
    expected = hasher.chain(pack_tokens(TOKENS), hasher.root(salt))
    blocks = known().blocks(TOKENS, salt)
    assert blocks.hashes == expected and blocks.block_tokens == 4
    assert blocks.keys == b"".join(digest[:8] for digest in expected)
    assert known().name(expected[0]) == expected[0].hex()


def test_the_last_token_is_in_no_block() -> None:
    assert [len(known().blocks(TOKENS[:count], None).hashes) for count in (1, 4, 5, 8, 9)] == [0, 0, 1, 1, 2]


def test_tenants_share_no_key() -> None:
    keys = known()
    assert not {*keys.blocks(TOKENS, "a").hashes} & {
        *keys.blocks(TOKENS, "b").hashes,
        *keys.blocks(TOKENS, None).hashes,
    }


def test_a_token_takes_its_keys_and_values_in_every_layer() -> None:
    assert known().kv_bytes_per_token == 2 * 2 * 3 * 5 * 4 == LAYOUT.block_bytes / 4


@pytest.mark.parametrize("seed", [None, SEED])
def test_without_a_seed_or_a_layout_nothing_is_named(seed: bytes | None) -> None:
    keys = PromptKeys("sha256", seed, "m")
    if seed is None:
        keys.learn(LAYOUT.fingerprint())
    assert keys.blocks(TOKENS, None).keys == b""
    assert keys.kv_bytes_per_token == DEFAULT_KV_BYTES_PER_TOKEN
