"""Block memory as torch sees it: one tensor over the shared bytes, without a copy."""

import torch

from kvcache.layout import KVLayout
from kvcache.memory import BlockMemory

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def paged_view(memory: BlockMemory, layout: KVLayout) -> torch.Tensor:
    """[num_blocks, layers, 2, kv_heads, block_tokens, head_dim] over `memory`, contiguous, zero-copy.

    The tensor keeps the mapping alive past `memory.close()`. ValueError where a block of `layout` has another size
    than a block of `memory`.
    """
    if layout.block_bytes != memory.block_bytes:
        raise ValueError(f"a block is {layout.block_bytes} bytes by its layout and {memory.block_bytes} in memory")
    # A memoryview of the mapping, not the mapping itself: torch holds on to the object that it is given, and only a
    # live view stops the mapping from being closed beneath the tensor.
    flat = torch.frombuffer(
        memoryview(memory.buffer)[: memory.num_blocks * memory.block_bytes], dtype=_DTYPES[layout.dtype]
    )
    return flat.view(memory.num_blocks, *layout.shape)
