import pytest

from kvcache.memory import BlockMemory


@pytest.fixture
def memory():
    """Four blocks of 4,096 bytes, each full of another byte."""
    memory = BlockMemory.create(4, 4096)
    for block in range(4):
        memory.block(block)[:] = bytes([block + 1]) * 4096
    yield memory
    memory.close()
