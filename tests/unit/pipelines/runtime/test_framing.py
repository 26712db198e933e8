import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.runtime.framing import FrameReader, pack
from pipelines.runtime.messages import EngineCommand, Release, ResetPrefixCache
from pipelines.types import wire
from tests.fakes.engine_play import fence


@given(st.lists(st.integers(1, 40)))
def test_messages_come_out_whole_however_the_bytes_come_in(cuts: list[int]) -> None:
    messages: list[EngineCommand] = [Release(fence("a" * 40)), ResetPrefixCache(), Release(fence("b"))]
    stream = b"".join(map(pack, messages))
    reader, frames = FrameReader(), []
    for cut in [*cuts, len(stream)]:
        frames += reader.feed(stream[:cut])
        stream = stream[cut:]
    assert [wire.decode(frame, EngineCommand) for frame in frames] == messages


def test_a_damaged_length_is_not_waited_for() -> None:
    with pytest.raises(AssertionError, match="damaged"):
        FrameReader().feed(b"\xff\xff\xff\xff")
