import hashlib
import logging
import struct

import numpy as np
import pytest
import xxhash

from kvcache.hashing import BlockHasher, pack_tokens, parse_seed, seed_digest

SEED = bytes(range(32))
LAYOUT = {"block_tokens": "4", "dtype": "float32", "head_dim": "8"}
TOKENS = [5, 6, 7, 8, 100000, 0, 1, 2, 9, 9, 9]


def hasher(algo="sha256", seed=SEED, model="smol", lora=None, layout=LAYOUT):
    return BlockHasher(algo, seed, model, lora, layout)


def packed(tokens):
    return struct.pack(f"<{len(tokens)}i", *tokens)


def domain(lora=None):
    """The root's formula, written out with nothing but hashlib."""

    def tagged(name, value):
        return len(name).to_bytes(4, "little") + len(value).to_bytes(4, "little") + name + value

    text = b"pronghorn block root 1\0" + tagged(b"seed", SEED) + tagged(b"model", b"smol")
    if lora is not None:
        text += tagged(b"lora", lora)
    text += tagged(b"layout.block_tokens", b"4") + tagged(b"layout.dtype", b"float32")
    text += tagged(b"layout.head_dim", b"8")
    return hashlib.sha256(text).digest()


def sha_chain(parent, blocks, extras=()):
    digests = []
    for index, block in enumerate(blocks):
        local = packed(block) + (extras[index] if extras else b"")
        parent = hashlib.sha256(hashlib.sha256(local).digest() + parent).digest()
        digests.append(parent)
    return digests


def test_digests_of_a_known_prompt_never_change():
    """Literal values: a change here breaks every cache and every mixed-version cluster."""
    got = hasher().chain(packed(TOKENS), hasher().root(None))
    assert [digest.hex() for digest in got] == GOLDEN_SHA256
    fast = hasher("ahash64")
    assert [digest.hex() for digest in fast.chain(packed(TOKENS), fast.root(None))] == GOLDEN_AHASH64


@pytest.mark.conformance(31, 32)
def test_sha256_chain_is_the_local_digest_then_the_parent():
    got = hasher().chain(packed(TOKENS), hasher().root(None))
    assert got == sha_chain(domain(), [TOKENS[:4], TOKENS[4:8]])


def test_root_without_salt_is_the_tagged_domain_and_an_empty_salt_is_none():
    assert hasher().root(None) == domain()
    assert hasher().root("") == domain()
    assert hasher(lora="sql").root(None) == domain(b"sql")


@pytest.mark.conformance(33)
def test_salt_is_xored_into_the_root():
    salt = hashlib.sha256("tenant é".encode()).digest()
    assert hasher().root("tenant é") == bytes(a ^ b for a, b in zip(domain(), salt, strict=True))


@pytest.mark.conformance(31)
@pytest.mark.parametrize("algo", ["sha256", "sha256_64", "ahash64"])
def test_a_chain_continued_block_by_block_is_the_chain_at_once(algo):
    chain = hasher(algo)
    whole = chain.chain(packed(TOKENS), chain.root(None))
    first = chain.chain(packed(TOKENS[:4]), chain.root(None))
    assert first + chain.chain(packed(TOKENS[4:]), first[-1]) == whole


@pytest.mark.conformance(32)
def test_ahash64_is_xxh3_of_the_block_and_its_parent():
    chain = hasher("ahash64")
    one = xxhash.xxh3_64_digest(packed(TOKENS[:4]) + domain()[:8])
    two = xxhash.xxh3_64_digest(packed(TOKENS[4:8]) + one)
    assert chain.chain(packed(TOKENS), chain.root(None)) == [one, two]


@pytest.mark.conformance(32)
def test_sha256_64_keeps_full_digests_inside_and_lets_eight_bytes_out():
    full = hasher("sha256").chain(packed(TOKENS), domain())
    inside = hasher("sha256_64").chain(packed(TOKENS), domain())
    assert inside == full
    assert [hasher("sha256_64").short(h) for h in inside] == [h[:8] for h in full]
    assert hasher("sha256").short(full[0]) == full[0]


@pytest.mark.conformance(34)
def test_ahash64_drops_the_salt_with_one_warning(caplog):
    chain = hasher("ahash64")
    with caplog.at_level(logging.WARNING):
        assert chain.root("a") == chain.root("b") == chain.root(None)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_arrays_lists_of_bytes_and_wide_tokens_hash_alike():
    wide = np.array(TOKENS, dtype=np.int64)
    assert pack_tokens(wide) == packed(TOKENS)
    chain = hasher()
    assert chain.chain(wide.astype(np.uint32), domain()) == chain.chain(memoryview(packed(TOKENS)), domain())


@pytest.mark.parametrize(
    "other",
    [
        hasher(seed=bytes(32)),
        hasher(model="other"),
        hasher(lora="smol"),
        hasher(lora=""),
        hasher(layout=LAYOUT | {"dtype": "bfloat16"}),
        hasher(model="smolx", layout={"block_tokens": "4", "dtype": "float32", "head_dim": "8", "x": ""}),
    ],
)
def test_seed_model_lora_and_layout_part_the_caches(other):
    assert other.root(None) != hasher().root(None)


def test_salt_and_lora_of_the_same_text_differ():
    assert hasher(lora="x").root(None) != hasher().root("x")


@pytest.mark.conformance(37)
def test_all_64_bits_of_an_image_enter_its_block():
    chain = hasher()
    image = 0x1122334455667788
    got = chain.chain(packed(TOKENS), domain(), {5: image})
    extra = struct.pack("<IQ", 1, image)
    assert got == sha_chain(domain(), [TOKENS[:4], TOKENS[4:8]], [b"", extra])
    assert got != chain.chain(packed(TOKENS), domain(), {5: image ^ (1 << 63)})
    assert got != chain.chain(packed(TOKENS), domain(), {6: image})


@pytest.mark.conformance(32)
def test_seed_text_is_64_hex_digits():
    assert parse_seed(SEED.hex()) == SEED
    for wrong in ("", "ab", "zz" * 32, SEED.hex() + "00", " " + SEED.hex()[1:]):
        with pytest.raises(ValueError, match="64 hex digits"):
            parse_seed(wrong)


def test_seed_digest_tells_seeds_apart_and_is_not_the_seed():
    assert seed_digest(SEED) != seed_digest(bytes(32))
    assert seed_digest(SEED) not in (SEED.hex(), hashlib.sha256(SEED).hexdigest())


@pytest.mark.conformance(32)
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"algo": "md5"}, "md5"),
        ({"seed": b"short"}, "32 bytes, not 5"),
        ({"layout": {}}, "block_tokens"),
        ({"layout": {"block_tokens": "0"}}, "block_tokens"),
    ],
)
def test_wrong_construction_names_the_fault(arguments, named):
    with pytest.raises(ValueError, match=named):
        hasher(**arguments)


GOLDEN_SHA256 = [
    "f908c78164be84a91c95e589011e3505d511edd1cae1a971f40f727a1127c067",
    "c3adee29593b65fde03b93353b858b8e25ccee910c91f38f2ad0a2c128c09de7",
]
GOLDEN_AHASH64 = ["1da2fbd0d5c7aa8c", "c7f365f0c5dcce73"]
