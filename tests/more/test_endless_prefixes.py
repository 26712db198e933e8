"""Ten million blocks that never come again pass through an index with a cap, in a process of its own."""

import os
import subprocess
import sys

import psutil
import pytest

from orchestrator.block_index import BlockIndex
from pronghorn.ids import Incarnation

CAP_BYTES = 64 * 1024 * 1024
BLOCKS = 10_000_000
CHAIN_BLOCKS = 256
HOLDERS = [Incarnation(f"node-{i}") for i in range(8)]
LIMIT_S = 300.0


def index_endlessly() -> None:
    """What the child does. AssertionError where the index outgrows its cap or forgets what is asked for."""
    process, index = psutil.Process(), BlockIndex(CAP_BYTES)
    hot = [os.urandom(8 * CHAIN_BLOCKS) for _ in HOLDERS]
    for holder, keys in zip(HOLDERS, hot, strict=True):
        index.stored(holder, None, keys)
    before_bytes, last = process.memory_info().rss, hot[0]
    for number in range(BLOCKS // CHAIN_BLOCKS):
        holder = number % len(HOLDERS)
        last = os.urandom(8 * CHAIN_BLOCKS)
        index.stored(HOLDERS[holder], None, last)
        assert index.find(hot[holder]) == {HOLDERS[holder]: CHAIN_BLOCKS}, f"a prefix in use is lost at {number}"
        if number % 500 == 0:
            grown_bytes = process.memory_info().rss - before_bytes
            assert grown_bytes <= 1.2 * CAP_BYTES, f"{grown_bytes} bytes at {number}"
    assert index.find(last) == {HOLDERS[holder]: CHAIN_BLOCKS}, "what came last is not known"
    assert index.size().blocks < BLOCKS // 2, "the cap was never reached"


@pytest.mark.field("dynamo#4429")
def test_ten_million_blocks_stay_within_the_cap_and_prefixes_in_use_are_kept() -> None:
    code = "from tests.more.test_endless_prefixes import index_endlessly; index_endlessly()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
