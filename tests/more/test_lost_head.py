"""The GCS of the Ray that `pronghorn up` starts for itself dies, and its state with it: that is the end of all, every
client is told, nothing stays, and the same command starts it again."""

import time

import pytest

from cluster.chaos.gcs import GcsServer
from tests.fakes.running_cluster import CommandLine, end, start
from tests.fakes.streams import streams
from tests.fakes.tiny_model_folder import write_tiny_model

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

NAME = "headless"
GONE_S = 240.0


@pytest.mark.cells("F13 P10")
def test_the_end_of_rays_head_is_told_to_every_client_and_leaves_nothing(pronghorn: CommandLine) -> None:
    options = (f"--model={write_tiny_model(pronghorn.home / 'tiny')}", "--kv-memory=16MiB", "--threads=1")
    cluster = start(pronghorn, NAME, *options)
    state = pronghorn.folder(NAME).state()
    assert state is not None and state.ray_address is not None
    with streams(cluster.url, count=4, tokens=900, limit_s=GONE_S, model="tiny") as running:
        GcsServer(state.ray_address, cluster.run_id, cluster.temp_dir).find().kill()
        endings = [stream.ended() for stream in running]
    assert "it did not end" not in endings, endings

    give_up_s = time.monotonic() + GONE_S
    while pronghorn.folder(NAME).path.exists():
        assert time.monotonic() < give_up_s, pronghorn.folder(NAME).state()
        time.sleep(0.1)  # another process, which tells by its folder alone
    cluster.assert_gone()

    again = start(pronghorn, NAME, *options)
    try:
        with streams(again.url, count=1, tokens=8, model="tiny") as [stream]:
            assert stream.ended() == "answered"
    finally:
        end(again)
