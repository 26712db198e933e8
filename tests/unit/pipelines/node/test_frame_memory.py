import resource
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
from pipelines.node.frame_memory import keep_frame_memory
if not keep_frame_memory():
    sys.exit(3)
def frames(count):
    for _ in range(count):
        b"".join([bytes(1 << 20), b"x"])
frames(20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
frames(20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_the_pages_of_a_frame_serve_the_next_one():
    ran = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True)
    if ran.returncode == 3:
        pytest.skip("the C library has no such setting here")
    frame_pages = (1 << 20) // resource.getpagesize()
    assert int(ran.stdout) < frame_pages, ran.stderr
