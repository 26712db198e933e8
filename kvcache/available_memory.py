"""How much memory this process can still get: the machine's, or its container's where that is less.

A file of memory is not refused by the kernel when a container's limit is near: the container is killed. So the limit
has to be read beforehand.
"""

from pathlib import Path


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that can be had without swapping or being killed; None where the system does not tell.

    Reads /proc/meminfo and the limits of cgroup v2 and v1 under `root`.
    """
    found = [n for n in (_machine(root), _container_v2(root), _container_v1(root)) if n is not None]
    return min(found) if found else None


def _machine(root: Path) -> int | None:
    value = _fields(root / "proc/meminfo").get("MemAvailable:")
    return None if value is None else value * 1024


def _container_v2(root: Path) -> int | None:
    folder = root / "sys/fs/cgroup"
    own = next((line[3:] for line in _lines(root / "proc/self/cgroup") if line.startswith("0::")), "/")
    least: int | None = None
    for path in [folder / own.strip("/"), *(folder / own.strip("/")).parents]:
        if not path.is_relative_to(folder):
            break
        left = _left(path / "memory.max", path / "memory.current", path / "memory.stat", "inactive_file")
        if left is not None and (least is None or left < least):
            least = left
    return least


def _container_v1(root: Path) -> int | None:
    folder = root / "sys/fs/cgroup/memory"
    return _left(
        folder / "memory.limit_in_bytes",
        folder / "memory.usage_in_bytes",
        folder / "memory.stat",
        "total_inactive_file",
    )


def _left(limit: Path, used: Path, stat: Path, reclaimable: str) -> int | None:
    """Limit less use; page cache that the kernel would drop first does not count as use."""
    limits, uses = _lines(limit), _lines(used)
    if not limits or not uses or not limits[0].isdecimal():  # "max": no limit
        return None
    return max(0, int(limits[0]) - int(uses[0]) + _fields(stat).get(reclaimable, 0))


def _fields(path: Path) -> dict[str, int]:
    pairs = [line.split() for line in _lines(path)]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) >= 2 and pair[1].isdecimal()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
