"""What every connector does; then what those that keep blocks do, and the tiers alone."""

import asyncio
from pathlib import Path

import pytest

from kvcache import tiers
from kvcache.connector import KVConnector, NullConnector
from kvcache.dkv_connector import DKVConnector, Fetched
from kvcache.fetch_plan import COMPUTE, FADES_S, BlockPrices, Rates
from kvcache.hashing import BlockHash
from kvcache.layered_connector import LayeredConnector
from kvcache.tiers import TieredConnector, local_connector, tiered_connector
from pronghorn.clock import ManualClock
from pronghorn.counters import Counters
from pronghorn.ids import NodeName
from tests.contract.test_node_registry import OLD as RECORD

SIZE = 64
HASHES = [BlockHash(bytes([n]) * 32) for n in range(1, 7)]
HINT = {"version": 1, "instances": [{"name": RECORD.name, "blocks": 4, "last_hash": HASHES[3].hex()}]}


def block(n: int) -> bytes:
    return bytes((n * 31 + i) % 251 for i in range(SIZE))


class OnePeer:
    """`BlockSource`: has the first four blocks."""

    async def fetch(self, holder, hashes, destinations, budget_s, patience_s) -> Fetched:
        known = [h for h in hashes if h in HASHES[:4]]
        for block_hash, destination in zip(known, destinations, strict=False):
            destination[:] = block(HASHES.index(block_hash))
        return Fetched(len(known), len(known) * SIZE, 0.01)


def prices() -> BlockPrices:
    return BlockPrices(Rates(), SIZE, 16)


def dkv(counters: Counters) -> DKVConnector:
    return DKVConnector(
        name=NodeName("us"),
        peers=lambda: {RECORD.name: RECORD},
        source=OnePeer(),
        directory=None,
        prices=prices(),
        clock=ManualClock(),
        counters=counters,
    )


@pytest.fixture(params=["null", "local", "tiered", "dkv", "dkv over local", "dkv over tiered"])
async def made(request: pytest.FixtureRequest, tmp_path: Path):
    counters = Counters()
    connector: KVConnector = {
        "null": lambda: NullConnector(counters),
        "local": lambda: local_connector("n", 100 * SIZE, prices(), counters, ManualClock()),
        "tiered": lambda: tiered_connector("n", 2 * SIZE, 100 * SIZE, tmp_path, prices(), counters, ManualClock()),
        "dkv": lambda: dkv(counters),
        "dkv over local": lambda: LayeredConnector(
            local_connector("n", 100 * SIZE, prices(), counters, ManualClock()), dkv(counters), ManualClock()
        ),
        "dkv over tiered": lambda: LayeredConnector(
            tiered_connector("n", 2 * SIZE, 100 * SIZE, tmp_path, prices(), counters, ManualClock()),
            dkv(counters),
            ManualClock(),
        ),
    }[request.param]()
    yield connector
    await connector.close()


async def written(connector: KVConnector) -> None:
    async with asyncio.timeout(60.0):
        while connector.poll():  # noqa: ASYNC110  # what it is for
            await asyncio.sleep(0.005)


async def filled(connector: KVConnector) -> None:
    connector.offload(None, HASHES[:4], [memoryview(block(n)) for n in range(4)])
    await written(connector)


@pytest.mark.conformance(39)
async def test_what_is_located_is_loaded_right_and_nothing_else_is_written(made: KVConnector) -> None:
    await filled(made)
    located = await made.lookup(HASHES, 1, HINT)
    assert located.blocks in (1, 4)
    destinations = [memoryview(bytearray(SIZE)) for _ in range(located.blocks - 1)]
    landed = await made.load(located, HASHES[: located.blocks], 1, destinations, 5.0)
    assert landed.blocks == located.blocks - 1
    assert sum(landed.size_bytes.values()) == landed.blocks * SIZE
    assert [bytes(d) for d in destinations] == [block(n) for n in range(1, located.blocks)]


async def test_an_unknown_chain_or_a_hint_of_no_use_is_a_miss(made: KVConnector) -> None:
    await filled(made)
    strange = [BlockHash(bytes([100 + n]) * 32) for n in range(6)]
    for hint in (None, {"version": 9}, {}, HINT):
        located = await made.lookup(strange, 0, hint)
        assert located.blocks == 0
        assert (await made.load(located, strange, 0, [], 1.0)).blocks == 0


async def test_after_a_reset_nothing_is_kept(made: KVConnector) -> None:
    await filled(made)
    assert made.has(HASHES[0]) == made.keeps
    made.reset()
    assert not made.has(HASHES[0])
    assert (await made.lookup(HASHES, 0, None)).blocks == 0


async def test_what_follows_a_block_that_is_not_kept_is_not_taken(made: KVConnector) -> None:
    assert made.offload(HASHES[0], HASHES[1:2], [memoryview(block(1))]) == 0
    assert not made.has(HASHES[1])
    taken = made.offload(None, HASHES[:2], [memoryview(block(0)), memoryview(block(1))])
    assert taken == (2 if made.keeps else 0)


async def test_closing_twice_is_closing(made: KVConnector) -> None:
    await made.close()
    made.touch(HASHES)
    assert made.poll() == 0


# --- tiers ------------------------------------------------------------------------------------------------------------


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def restore(connector: TieredConnector, count: int) -> int:
    located = await connector.lookup(HASHES, 0, None)
    destinations = [memoryview(bytearray(SIZE)) for _ in range(min(count, located.blocks))]
    landed = (await connector.load(located, HASHES, 0, destinations, 5.0)).blocks
    assert [bytes(d) for d in destinations[:landed]] == [block(n) for n in range(landed)]
    return landed


@pytest.mark.conformance(40)
async def test_budgets_are_kept_and_what_memory_cannot_hold_comes_back_from_disk(tmp_path: Path) -> None:
    counters = Counters()
    connector = tiered_connector("n", 2 * SIZE, 3 * SIZE, tmp_path, prices(), counters, ManualClock())
    await filled(connector)
    assert connector.disk is not None
    assert (connector.host.size_bytes, connector.disk.size_bytes) == (2 * SIZE, 2 * SIZE)
    assert await restore(connector, 4) == 4
    connector.offload(HASHES[3], HASHES[4:], [memoryview(block(n)) for n in (4, 5)])
    await written(connector)
    assert connector.disk.size_bytes == 3 * SIZE and len(files(tmp_path)) == 3
    await connector.close()
    assert not files(tmp_path)


async def test_a_disk_budget_of_nothing_is_no_disk_tier(tmp_path: Path) -> None:
    connector = tiered_connector("n", 2 * SIZE, 0, tmp_path, prices(), Counters(), ManualClock())
    await filled(connector)
    assert connector.disk is None and not files(tmp_path)
    assert len(connector.host) == 2
    await connector.close()


async def test_a_host_budget_of_nothing_leaves_the_disk(tmp_path: Path) -> None:
    connector = tiered_connector("n", 0, 100 * SIZE, tmp_path, prices(), Counters(), ManualClock())
    await filled(connector)
    assert len(connector.host) == 0 and await restore(connector, 4) == 4
    await connector.close()


async def test_what_memory_gives_up_as_the_writer_ends_is_written_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def at_once(write, *args) -> object:
        return write(*args)

    monkeypatch.setattr(asyncio, "to_thread", at_once)
    connector = tiered_connector("n", 0, 100 * SIZE, tmp_path, prices(), Counters(), ManualClock())
    connector.offload(None, HASHES[:1], [memoryview(block(0))])
    await asyncio.sleep(0)  # the writer has run to its end, and nobody has been told of that yet
    connector.offload(HASHES[0], HASHES[1:2], [memoryview(block(1))])
    await written(connector)
    assert connector.disk is not None and len(connector.disk) == 2
    await connector.close()


async def test_a_file_that_could_not_be_written_whole_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    connector = tiered_connector("n", 0, 100 * SIZE, tmp_path, prices(), Counters(), ManualClock())
    await filled(connector)
    assert not files(tmp_path)
    await connector.close()


@pytest.mark.parametrize("harm", ["changed", "cut", "gone"])
async def test_what_the_disk_has_harmed_is_a_miss_and_counted(tmp_path: Path, harm: str) -> None:
    counters = Counters()
    connector = tiered_connector("n", 0, 100 * SIZE, tmp_path, prices(), counters, ManualClock())
    await filled(connector)
    path = tmp_path / "n" / HASHES[1].hex()
    match harm:
        case "changed":
            path.write_bytes(bytes(SIZE))
        case "cut":
            path.write_bytes(block(1)[:-1])
        case "gone":
            path.unlink()
    assert await restore(connector, 4) == 1
    assert sum(n for name, n in counters.snapshot().items() if name.startswith("tier_miss")) >= 1
    assert (await connector.lookup(HASHES, 0, None)).blocks == 1
    await connector.close()


@pytest.mark.parametrize(("host", "disk"), [(3, 0), (0, 3), (1, 2), (2, 1)])
async def test_a_chain_loses_its_end_first_and_a_newer_one_takes_the_place_of_the_older(
    tmp_path: Path, host: int, disk: int
) -> None:
    connector = tiered_connector("n", host * SIZE, disk * SIZE, tmp_path, prices(), Counters(), ManualClock())
    old = [BlockHash(bytes([50 + n]) * 32) for n in range(3)]
    assert connector.offload(None, old, [memoryview(block(n)) for n in range(3)]) == 3
    kept = []
    for at in range(3):
        assert connector.offload(HASHES[at - 1] if at else None, HASHES[at : at + 1], [memoryview(block(at))]) == 1
        await written(connector)
        kept.append((await connector.lookup(old, 0, None)).blocks)
        assert await restore(connector, 3) == at + 1
    assert kept == [2, 1, 0]
    assert connector.offload(HASHES[2], HASHES[3:4], [memoryview(block(3))]) == 0  # no place behind its own beginning
    assert await restore(connector, 4) == 3
    await connector.close()


async def test_memory_that_cannot_be_written_to_disk_as_fast_as_it_fills_takes_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "MAX_UNWRITTEN", 2)
    connector = tiered_connector("n", SIZE, 100 * SIZE, tmp_path, prices(), Counters(), ManualClock())
    assert connector.offload(None, HASHES, [memoryview(block(n)) for n in range(6)]) == 3
    assert await restore(connector, 6) == 3  # from memory, those that are on their way as well
    await written(connector)
    assert connector.offload(HASHES[2], HASHES[3:], [memoryview(block(n)) for n in range(3, 6)]) == 2
    await connector.close()


async def test_what_lies_on_a_disk_slower_than_the_engine_is_computed_and_tried_again_later(tmp_path: Path) -> None:
    clock, counters, known = ManualClock(), Counters(), prices()
    connector = tiered_connector("n", 2 * SIZE, 100 * SIZE, tmp_path, known, counters, clock)
    connector.offload(None, HASHES[:4], [memoryview(block(n)) for n in range(4)])
    assert (await connector.lookup(HASHES, 0, None)).blocks == 4  # nothing is known of either
    known.rates.note(COMPUTE, 16.0, 0.001, clock.now_s())
    known.rates.note("host", SIZE, 0.0001, clock.now_s())
    known.rates.note("disk", SIZE, 0.003, clock.now_s())
    located = await connector.lookup(HASHES, 0, None)
    assert located.blocks == 2 and counters.value("tier_declined", "cheaper_to_compute") == 1
    assert (await connector.lookup(HASHES, 2, None)).blocks == 2
    clock.advance(FADES_S + 1.0)
    assert (await connector.lookup(HASHES, 0, None)).blocks == 4
    await connector.close()


async def test_what_is_touched_stays_longer() -> None:
    connector = local_connector("n", 2 * SIZE, prices(), Counters(), ManualClock())
    connector.offload(None, HASHES[:2], [memoryview(block(n)) for n in (0, 1)])
    connector.touch(HASHES[:1])
    connector.offload(None, HASHES[2:3], [memoryview(block(2))])
    assert HASHES[0] in connector.host and HASHES[1] not in connector.host
    await connector.close()
