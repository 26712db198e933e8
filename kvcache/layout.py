"""The shape of a KV block, and the names under which two nodes compare it.

Block-major: one block, all layers of it, is one contiguous span, so it leaves without gathering and lands without
scattering. Knows sizes and names; not memory, nor torch.
"""

from typing import Literal

import msgspec

KVDtype = Literal["float32", "bfloat16", "float16"]

ITEM_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

ORDER = "layer,kv,head,token,dim"
"""Order of the axes inside a block. In the fingerprint: a node with another order is refused at the handshake."""


class KVLayout(msgspec.Struct, frozen=True):
    """ValueError on an unknown dtype or a size below 1, naming the field."""

    model: str
    dtype: KVDtype
    block_tokens: int
    num_layers: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(ITEM_BYTES)}")
        for name in ("block_tokens", "num_layers", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """(layers, 2: keys then values, kv_heads, block_tokens, head_dim), row-major."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_tokens, self.head_dim)

    @property
    def block_bytes(self) -> int:
        layers, two, heads, tokens, dim = self.shape
        return layers * two * heads * tokens * dim * ITEM_BYTES[self.dtype]

    def fingerprint(self) -> dict[str, str]:
        """Every fact on which two nodes must agree before one reads the other's bytes, by name."""
        return {name: str(getattr(self, name)) for name in self.__struct_fields__} | {"order": ORDER}
