import pytest
import torch

from kvcache.layout import KVLayout
from kvcache.memory import BlockMemory
from kvcache.storage import paged_view
from kvcache.transfer import block_digest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_tensor_and_the_blocks_are_the_same_bytes(dtype):
    layout = KVLayout("m", dtype, block_tokens=2, num_layers=3, num_kv_heads=1, head_dim=4)
    memory = BlockMemory.create(5, layout.block_bytes)
    view = paged_view(memory, layout)  # [num_blocks, layers, 2, kv_heads, block_tokens, head_dim]
    assert view.shape == (5, 3, 2, 1, 2, 4) and view.is_contiguous()
    view[2] = 1.5
    expected = torch.full(layout.shape, 1.5, dtype=getattr(torch, dtype))
    assert bytes(memory.block(2)) == bytes(expected.view(torch.uint8).numpy().tobytes())
    memory.block(3)[:] = memory.block(2)
    assert torch.equal(view[3], view[2]) and not view[4].any()
    memory.close()


def test_the_tensor_outlives_the_memory():
    layout = KVLayout("m", "float32", 1, 1, 1, 1)
    memory = BlockMemory.create(2, layout.block_bytes)
    view = paged_view(memory, layout)
    memory.close()
    view[1] = 3.0
    assert view.sum() == 6.0


def test_another_block_size_is_refused():
    memory = BlockMemory.create(2, 64)
    with pytest.raises(ValueError, match="8 bytes by its layout and 64 in memory"):
        paged_view(memory, KVLayout("m", "float32", 1, 1, 1, 1))
    memory.close()


@pytest.mark.field("ROCm/ATOM#2154")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_keys_and_values_of_every_layer_are_in_the_block_that_is_sent_and_digested(dtype):
    """ROCm/ATOM#2154: the state of some layers was not sent, and the text was fluent."""
    layout = KVLayout("m", dtype, block_tokens=2, num_layers=5, num_kv_heads=3, head_dim=4)
    memory = BlockMemory.create(2, layout.block_bytes)
    view = paged_view(memory, layout)
    digests = {block_digest(memory.block(1))}
    regions = [(layer, kv, head) for layer in range(5) for kv in range(2) for head in range(3)]
    for region in regions:
        view[1][region] = 1.0
        digests.add(block_digest(memory.block(1)))
    assert len(digests) == 1 + len(regions)
    assert view[1].numel() * view.element_size() == layout.block_bytes, "nothing of a layer lies outside of its block"
    memory.close()
