import pytest

from kvcache.available_memory import available_bytes

MIB = 1 << 20


@pytest.fixture
def machine(tmp_path):
    """Writes the files of a made-up system and asks what is available there."""

    def ask(**files):
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("_DOT_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return available_bytes(tmp_path)

    return ask


MEMINFO = "MemTotal:  9000 kB\nMemAvailable:   4096 kB\nHugePages_Total:  0\n"


def test_a_machine_without_limits_has_what_the_kernel_says(machine):
    assert machine(proc__meminfo=MEMINFO) == 4 * MIB


def test_a_system_that_tells_nothing_is_unknown(machine):
    assert machine() is None


def test_a_container_limit_counts_less_its_use_and_with_its_reclaimable_cache(machine):
    files = {
        "proc__meminfo": MEMINFO,
        "proc__self__cgroup": "0::/\n",
        "sys__fs__cgroup__memory_DOT_max": f"{3 * MIB}\n",
        "sys__fs__cgroup__memory_DOT_current": f"{2 * MIB}\n",
        "sys__fs__cgroup__memory_DOT_stat": f"anon 5\ninactive_file {MIB}\n",
    }
    assert machine(**files) == 2 * MIB


def test_the_tightest_group_above_the_process_decides(machine):
    files = {
        "proc__meminfo": MEMINFO,
        "proc__self__cgroup": "0::/pod/box\n",
        "sys__fs__cgroup__pod__box__memory_DOT_max": "max\n",
        "sys__fs__cgroup__pod__box__memory_DOT_current": "1\n",
        "sys__fs__cgroup__pod__memory_DOT_max": f"{MIB}\n",
        "sys__fs__cgroup__pod__memory_DOT_current": "0\n",
    }
    assert machine(**files) == MIB


def test_the_older_kind_of_group_is_read_too(machine):
    files = {
        "sys__fs__cgroup__memory__memory_DOT_limit_in_bytes": f"{3 * MIB}\n",
        "sys__fs__cgroup__memory__memory_DOT_usage_in_bytes": f"{5 * MIB}\n",
    }
    assert machine(**files) == 0
