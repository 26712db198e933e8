"""Every feature of generation on a real cluster: apart gives what one process gives."""

import pytest

from tests.fakes.running_cluster import CommandLine

pytestmark = pytest.mark.timeout(900)


def test_every_feature_is_equal_apart_and_in_one_process(pronghorn: CommandLine) -> None:
    done = pronghorn("verify", "parity", "--features", "--quick", timeout_s=800)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if "│" in line]
    assert len(rows) >= 16 and "all agree" in done.stdout
