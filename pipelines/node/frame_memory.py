"""Memory of frames, kept between one and the next.

The C library gives a freed piece of a megabyte back to the kernel, which clears the pages of the next one again: a
quarter of the processor time that a node took to receive blocks over gRPC (0.46 s a GB, 0.35 without). Knows glibc's
settings; elsewhere it does nothing.
"""

import ctypes
import sys
from typing import Final

from kvcache.transfer import TARGET_FRAME_BYTES

KEPT_BYTES: Final = 64 << 20
"""What a process keeps at most of what it has freed at the end of its heap."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_frame_memory() -> bool:
    """For the whole process, any number of times; whether it could be had."""
    allocator = ctypes.CDLL(None)
    if sys.platform != "linux" or not hasattr(allocator, "mallopt"):
        return False
    settings = {_MMAP_THRESHOLD: 4 * TARGET_FRAME_BYTES, _TRIM_THRESHOLD: KEPT_BYTES}
    return all(allocator.mallopt(name, value) == 1 for name, value in settings.items())
