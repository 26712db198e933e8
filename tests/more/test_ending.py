"""How a cluster in the foreground of a terminal ends: whoever ends it, and whenever, nothing of it stays."""

import signal
import time

import pytest

from tests.fakes.running_cluster import START_TIMEOUT_S, CommandLine, Traces
from tests.fakes.streams import streams
from tests.fakes.terminal import CTRL_C, foreground, ready

pytestmark = pytest.mark.timeout(600)

NAME = "ending"
OPTIONS = ("--kv-memory=192MiB", "--drain-timeout=60")
END_S = 180.0
"""What ending may take, the drain aside."""


def test_ctrl_c_lets_the_streams_end_and_leaves_nothing(pronghorn: CommandLine) -> None:
    with foreground(pronghorn, NAME, *OPTIONS) as shown:
        cluster = ready(shown, pronghorn, NAME, START_TIMEOUT_S)
        with streams(cluster.url, count=3, tokens=300) as running:
            assert all(stream.runs for stream in running)
            shown.press(CTRL_C)
        assert [stream.ended() for stream in running] == ["answered"] * 3
        assert shown.wait(END_S) == 0
        cluster.assert_gone()


@pytest.mark.chaos  # for its time
def test_a_second_interrupt_does_not_wait_for_streams(pronghorn: CommandLine) -> None:
    with foreground(pronghorn, NAME, *OPTIONS, as_background_job=True) as shown:
        cluster = ready(shown, pronghorn, NAME, START_TIMEOUT_S)
        with streams(cluster.url, count=2, tokens=4000) as running:
            shown.signal_group(signal.SIGINT)
            shown.wait_for("letting the requests in progress finish", 10.0)
            time.sleep(4.0)  # longer than Ray's client leaves a process that was told to end
            assert all(stream.runs for stream in running)
            shown.signal_group(signal.SIGINT)
            assert shown.wait(END_S) == 0
        assert "answered" not in [stream.ended() for stream in running]
        cluster.assert_gone()


@pytest.mark.parametrize(
    "stage", ["looking at the model", "starting Ray", pytest.param("starting Serve", marks=pytest.mark.chaos)]
)
def test_ctrl_c_while_it_starts_leaves_nothing(pronghorn: CommandLine, stage: str) -> None:
    traces = Traces(NAME)
    with foreground(pronghorn, NAME, *OPTIONS) as shown:
        shown.wait_for(stage, 60.0)
        shown.press(CTRL_C)
        shown.wait(END_S)
        assert not pronghorn.folder(NAME).path.exists()
        traces.assert_none()


def test_closing_the_terminal_ends_it(pronghorn: CommandLine) -> None:
    traces = Traces(NAME)
    with foreground(pronghorn, NAME, *OPTIONS) as shown:
        shown.wait_for("starting 1 prefill", 120.0)
        shown.hang_up()
        shown.wait(END_S)
        assert not pronghorn.folder(NAME).path.exists()
        traces.assert_none()
