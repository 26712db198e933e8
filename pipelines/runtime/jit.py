"""How the CPU kernels are compiled: by numba at first use, without the GIL, kept in numba's cache on disk.

No C++ compiler is needed. The seconds of compiling are paid once per machine and version: the pipeline's canary goes
through every kernel before the engine says that it is ready.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

KernelT = TypeVar("KernelT", bound=Callable[..., Any])

KERNEL_FILES = (
    "jit.py", "simd.py", "vector_math.py", "cell_values.py", "atomics.py", "linear.py", "team.py", "paged_attention.py",
    "compiled_decoder.py",
)  # fmt: skip

# Not nnan or ninf: a NaN that the model computes must reach the logits, where it is looked for.
_FASTMATH = {"reassoc", "contract", "nsz", "arcp", "afn"}


def compiled(kernel: KernelT) -> KernelT:
    """Decorates a function in numba's subset of Python. No bounds are checked inside."""
    flags: dict[str, Any] = {"nogil": True, "fastmath": _FASTMATH, "error_model": "numpy"}
    try:
        dispatcher = numba.njit(cache=True, **flags)(kernel)
    except RuntimeError:  # no folder to cache in can be written: compile anew in each process
        return cast(KernelT, numba.njit(**flags)(kernel))
    # Numba looks only at the file of the function itself, but a kernel is inlined into those that call it.
    dispatcher._cache._cache_file._source_stamp = _source_stamp()
    return cast(KernelT, dispatcher)


def _source_stamp() -> tuple[tuple[int, int], ...]:
    files = [Path(__file__).with_name(name) for name in KERNEL_FILES]
    return tuple((stat.st_mtime_ns, stat.st_size) for stat in (file.stat() for file in files if file.exists()))
