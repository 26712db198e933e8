"""Names for full blocks: a chain of digests over tokens, rooted in the cluster's seed, model, layout and a salt.

Knows tokens and bytes; not who asks, nor where a block lies. The same inputs give the same digests on any host: tokens
are packed as 32-bit little-endian integers, whatever the host's byte order.

    domain  = SHA256(tagged cluster seed, model, LoRA name, layout fingerprint)
    root    = domain XOR SHA256(utf8(salt))             without a salt (None or ""): domain
    digest  = SHA256(SHA256(tokens of the block) || parent digest)         sha256, sha256_64
    digest  = XXH3-64(tokens of the block || parent digest), big-endian    ahash64

A token that stands for an image is followed, in the hashed bytes of its block, by the image's own 64-bit hash: see
`chain`. Digests of `ahash64` are ours: 64 bits, fast, not cryptographic, and not those of any other system of that
name. A salt cannot protect anybody there, since collisions can be made on purpose; it is dropped, with one warning.
"""

import hashlib
import logging
from collections.abc import Iterable, Mapping
from struct import pack
from typing import Literal, NewType, cast, get_args

import numpy as np
import xxhash
from numpy.typing import NDArray

log = logging.getLogger(__name__)

BlockHash = NewType("BlockHash", bytes)
"""Full digest of a block and of everything before it: 32 bytes, or 8 under `ahash64`."""

HashAlgo = Literal["sha256", "sha256_64", "ahash64"]

SEED_BYTES = 32


def parse_seed(text: str) -> bytes:
    """The 32 bytes that 64 hex digits name; ValueError otherwise. The text is a secret and stays out of the error."""
    try:
        seed = bytes.fromhex(text)
    except ValueError:
        raise ValueError("a hash seed is 64 hex digits, and this text is not hex") from None
    if len(seed) != SEED_BYTES or len(text) != 2 * SEED_BYTES:
        raise ValueError(f"a hash seed is 64 hex digits, not {len(text)} characters")
    return seed


def seed_digest(seed: bytes) -> str:
    """What two nodes compare to learn that they share a seed: tells nothing of the seed itself."""
    return hashlib.sha256(b"pronghorn seed digest\0" + seed).hexdigest()[:32]


def pack_tokens(tokens: NDArray[np.integer]) -> bytes:
    """Tokens as 32-bit little-endian integers. Copies: hand it only the part that is to be hashed."""
    return tokens.astype("<u4").tobytes()


INDEX_KEY_BYTES = 8


def index_keys(hashes: Iterable[bytes]) -> bytes:
    """What names these blocks in an index: the first 8 bytes of each digest, a little-endian u64, packed.

    Of an index only: what is fetched or reused is named by its whole digest.
    """
    return b"".join([block_hash[:INDEX_KEY_BYTES] for block_hash in hashes])


class BlockHasher:
    """Hashes the blocks of one model, LoRA and layout. Immutable but for having warned once.

    `layout` is `KVLayout.fingerprint()`; its `block_tokens` is the size of a block. ValueError on an unknown `algo`,
    a seed that is not 32 bytes, or a layout without a positive `block_tokens`.
    """

    def __init__(self, algo: HashAlgo, seed: bytes, model: str, lora: str | None, layout: Mapping[str, str]) -> None:
        if algo not in get_args(HashAlgo):
            raise ValueError(f"hash algorithm {algo!r} is not one of {', '.join(get_args(HashAlgo))}")
        if len(seed) != SEED_BYTES:
            raise ValueError(f"a hash seed is {SEED_BYTES} bytes, not {len(seed)}")
        if not layout.get("block_tokens", "").isdecimal() or int(layout["block_tokens"]) == 0:
            raise ValueError(f"layout['block_tokens'] must be a positive number, not {layout.get('block_tokens')!r}")
        self.algo = algo
        self.block_tokens = int(layout["block_tokens"])
        self._domain = _domain(seed, model, lora, layout)
        self._warned = False

    def root(self, salt: str | None) -> bytes:
        """The parent of a sequence's first block. Different salts never share a block; None and "" are no salt."""
        if self.algo == "ahash64":
            if salt and not self._warned:
                self._warned = True
                log.warning("kv_cache_hash_algo ahash64 cannot honour cache salts: they are ignored from here on")
            return self._domain[:8]
        if not salt:
            return self._domain
        salted = hashlib.sha256(salt.encode()).digest()
        return bytes(a ^ b for a, b in zip(self._domain, salted, strict=True))

    def chain(
        self,
        tokens_u32: bytes | memoryview | NDArray[np.uint32],
        parent: bytes,
        media: Mapping[int, int] | None = None,
    ) -> list[BlockHash]:
        """Hashes of the full blocks in `tokens_u32`, in order; a partial block at the end is left out.

        `parent` is `root()` for the start of a sequence, else the hash of the block just before: so a growing
        sequence hashes only what is new. `tokens_u32` is packed little-endian (`pack_tokens`), 4 bytes a token.
        `media` maps an index within `tokens_u32` to the unsigned 64-bit hash of the image or video that the token
        there stands for.
        """
        if isinstance(tokens_u32, np.ndarray):
            tokens_u32 = tokens_u32.astype("<u4", copy=False).tobytes()
        packed = bytes(tokens_u32)
        size = 4 * self.block_tokens
        ends = range(size, len(packed) + 1, size)
        if media:
            extras = self._media_by_block(media)
            blocks: Iterable[bytes] = (packed[e - size : e] + extras.get(e // size - 1, b"") for e in ends)
        else:
            blocks = (packed[end - size : end] for end in ends)
        return _fast_chain(blocks, parent) if self.algo == "ahash64" else _sha256_chain(blocks, parent)

    def short(self, block_hash: BlockHash) -> bytes:
        """The canonical form that crosses interfaces: 32 bytes under `sha256`, else the first 8."""
        return block_hash if self.algo == "sha256" else block_hash[:8]

    def _media_by_block(self, media: Mapping[int, int]) -> dict[int, bytes]:
        extras: dict[int, bytes] = {}
        for index, content in sorted(media.items()):
            block, offset = divmod(index, self.block_tokens)
            extras[block] = extras.get(block, b"") + pack("<IQ", offset, content)
        return extras


def _sha256_chain(blocks: Iterable[bytes], parent: bytes) -> list[BlockHash]:
    sha256 = hashlib.sha256
    hashes: list[bytes] = []
    for block in blocks:
        parent = sha256(sha256(block).digest() + parent).digest()
        hashes.append(parent)
    return cast(list[BlockHash], hashes)


def _fast_chain(blocks: Iterable[bytes], parent: bytes) -> list[BlockHash]:
    digest = xxhash.xxh3_64_digest
    return cast(list[BlockHash], [parent := digest(block + parent) for block in blocks])


def _domain(seed: bytes, model: str, lora: str | None, layout: Mapping[str, str]) -> bytes:
    fields = [("seed", seed), ("model", model.encode())]
    if lora is not None:
        fields.append(("lora", lora.encode()))
    fields += [(f"layout.{name}", layout[name].encode()) for name in sorted(layout)]
    return hashlib.sha256(b"pronghorn block root 1\0" + b"".join(_tagged(fields))).digest()


def _tagged(fields: Iterable[tuple[str, bytes]]) -> Iterable[bytes]:
    """Each field behind its length and its name's, so that no two lists of fields give the same bytes."""
    for name, value in fields:
        yield pack("<II", len(name.encode()), len(value)) + name.encode() + value
