"""A run of scenarios that is interrupted leaves no process and no folder, however far it has come."""

import signal
import subprocess
from pathlib import Path

import pytest

from tests.fakes.running_cluster import CommandLine, Traces

pytestmark = [pytest.mark.timeout(1200), pytest.mark.chaos]

END_S = 300.0
SCENARIO = """
about: A decode node stands still for as long as anybody likes.
load: {streams: 2, prompts: 2}
faults: [{kind: stop, process: decode, for_s: 3600, at: {pieces: 4}}]
limit_s: 3600
"""


@pytest.mark.parametrize("said", ["starting chaos-", "2 streams"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_stays(pronghorn: CommandLine, tmp_path: Path, said: str, number: signal.Signals) -> None:
    file = tmp_path / "endless.yaml"
    file.write_text(SCENARIO)
    with subprocess.Popen(
        pronghorn.command("chaos", "run", str(file)), env=pronghorn.environ, cwd=pronghorn.home,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        traces = Traces(f"chaos-{process.pid}")
        assert process.stderr is not None
        heard = next(line for line in process.stderr if said in line)
        process.send_signal(number)
        rest = process.stderr.read()
        assert process.wait(END_S) != 0, heard + rest
    traces.assert_none()
    assert list(pronghorn.home.glob("p/*")) == []  # not even the folder, where there had been nothing yet
