"""What a node of either kind gives to, and gets from, the cluster's cache: put together here, once for both.

Knows the parts and their order: holds in the engine, fetches that are served, the connector, the loader. Decides
nothing itself. Invariant: after `stop` nothing touches the block memory.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvcache import digested_copy
from kvcache.connector import KVConnector, NullConnector
from kvcache.contents import CacheContents
from kvcache.directory import BlockDirectory
from kvcache.dkv_connector import DKVConnector
from kvcache.fetch_plan import COMPUTE, BlockPrices, Rates
from kvcache.handshake import Identity
from kvcache.hashing import BlockHasher
from kvcache.layered_connector import LayeredConnector
from kvcache.memory import BlockMemory
from kvcache.registration import keep_seed
from kvcache.registry import NodeRegistry
from kvcache.tier_order import TIERS
from kvcache.tiers import TieredConnector, local_connector, tiered_connector
from pipelines.node.block_feed import Event, events_of
from pipelines.node.config import NodeConfig
from pipelines.node.directory_publisher import DirectoryPublisher
from pipelines.node.engine_holds import EngineHolds
from pipelines.node.engine_link import EngineLink
from pipelines.node.fetch_client import FetchClient
from pipelines.node.fetch_service import LEASE_S, FetchService
from pipelines.node.offloader import Offloader
from pipelines.node.peers import Peers
from pipelines.node.prefix_loader import PrefixLoader
from pipelines.node.stream_port import StreamPort
from pipelines.node.stream_service import StreamMethod
from pipelines.runtime.messages import EngineReady, StepReport
from pipelines.types.frames import TierReport
from pronghorn.clock import Clock
from pronghorn.counters import Counters
from pronghorn.ids import Incarnation, NodeName
from pronghorn.ledger import Held, Kind
from pronghorn.tasks import Owner
from pronghorn.wire import FETCH_METHOD

IDLE_CHANNELS_PERIOD_S = 30.0


class CacheExchange:
    loader: PrefixLoader
    """From `open` on."""

    def __init__(
        self,
        *,
        name: NodeName,
        seed: bytes,
        config: NodeConfig,
        link: EngineLink,
        contents: CacheContents,
        registry: NodeRegistry,
        streams: StreamPort,
        directory: BlockDirectory | None,
        registered_at_unix_s: Callable[[], float],
        identity: Callable[[], Identity],
        require_serving: Callable[[], None],
        tell_kept: Callable[[Mapping[str, Sequence[Event]]], None],
        clock: Clock,
        counters: Counters,
    ) -> None:
        """`tell_kept` hears each change of what the tiers reach, once `kept` has it."""
        self._name = name
        self._seed = seed
        self._told = config
        self._config = config.engine
        self._link = link
        self._contents = contents
        self._streams = streams
        self._directory = directory
        self._registered_at_unix_s = registered_at_unix_s
        self._publisher: DirectoryPublisher | None = None
        self._offloader: Offloader | None = None
        self._tiers: TieredConnector | None = None
        self._tell_kept = tell_kept
        self._identity = identity
        self._clock = clock
        self._counters = counters
        self._registry = registry
        self.peers = Peers(registry, name, self._config.model_name)
        self._rates = Rates()
        self._holds = EngineHolds(link.send)
        self._service = FetchService(identity, require_serving, self._holds, link, clock, counters)
        self._connector: KVConnector = NullConnector(counters, self.peers)

    def open(self, ready: EngineReady, owner: Owner) -> StreamMethod:
        """The engine has started: the stream that is to be served beside the node's own methods. Runs under `owner`."""
        hasher = BlockHasher(self._config.hash_algo, self._seed, self._config.model_name, None, ready.layout)
        memory = self._link.memory
        digested_copy.prepare()
        if self._config.enable_prefix_caching:
            self._connector = self._new_connector(memory)
        if self._tiers is not None:
            self._tiers.reach.on_change = self._tell_soon
            self._offloader = Offloader(self._connector, self._contents, self._holds, memory, self._counters)
            owner.start(self._offloader.run(), "offload")
        self.loader = PrefixLoader(
            self._connector, hasher, self._contents, self._holds, memory, self._clock, self._counters
        )
        if self._directory is not None and self._config.enable_prefix_caching:
            ours = self._identity()
            self._publisher = DirectoryPublisher(
                self._directory,
                self._name,
                Incarnation(ours.incarnation),
                self._registered_at_unix_s(),
                self._contents,
                self._counters,
            )
            owner.start(self._publisher.run(), "directory")
        owner.start(self.peers.watch(), "peers")
        owner.start(keep_seed(self._registry, self._seed), "seed")
        owner.start(self._close_idle_channels(), "idle-channels")
        return StreamMethod(FETCH_METHOD, self._service.frames, LEASE_S)

    def _new_connector(self, memory: BlockMemory) -> KVConnector:
        match self._told.kv_connector:
            case "null":
                return self._connector
            case "local" | "tiered":
                return self._new_tiers(memory)
            case "dkv":
                dkv = DKVConnector(
                    name=self._name,
                    peers=self.peers,
                    source=FetchClient(self._identity, self._streams, self._clock),
                    directory=self._directory,
                    prices=self._prices(memory),
                    clock=self._clock,
                    counters=self._counters,
                )
                tiered = any(self._told.tier_bytes(0))
                return LayeredConnector(self._new_tiers(memory), dkv, self._clock) if tiered else dkv

    def _new_tiers(self, memory: BlockMemory) -> TieredConnector:
        tier_bytes = self._told.tier_bytes(memory.num_blocks * memory.block_bytes)
        name, counters, clock = self._name, self._counters, self._clock
        prices = self._prices(memory)
        if tier_bytes.disk:
            folder = Path(self._told.disk_offload_dir or "")
            self._tiers = tiered_connector(name, tier_bytes.host, tier_bytes.disk, folder, prices, counters, clock)
        else:
            self._tiers = local_connector(name, tier_bytes.host, prices, counters, clock)
        return self._tiers

    def _prices(self, memory: BlockMemory) -> BlockPrices:
        return BlockPrices(self._rates, memory.block_bytes, self._config.block_tokens)

    # --- tiers of its own ---------------------------------------------------------------------------------------------

    @property
    def kept(self) -> Mapping[str, CacheContents]:
        """What each tier reaches, as `tell_kept` was told."""
        return {} if self._tiers is None else self._tiers.reach.contents

    def tiers(self) -> dict[str, TierReport]:
        tiers = self._tiers
        if tiers is None:
            return {}
        found = tiers.reach.contents
        return {tier: TierReport(len(found[tier]), tiers.bytes_per_s(tier)) for tier in TIERS if tier in found}

    def _tell_soon(self) -> None:
        """What changes in one turn is told at once."""
        asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        assert self._tiers is not None, "there are no tiers to tell of"
        if changes := self._tiers.reach.take():
            self._tell_kept({tier: events_of(each) for tier, each in changes.items()})

    def on_report(self, report: StepReport) -> None:
        """After `contents` has taken its changes."""
        self._holds.on_events(report.holds)
        if self._publisher is not None and report.cache_changes:
            self._publisher.note(report.cache_changes)
        if self._tiers is not None and self._offloader is not None and report.cache_changes:
            self._tiers.reach.pool_changed(report.cache_changes)
            self._offloader.note(report.cache_changes)
        if report.stats is not None:
            self._rates.note(COMPUTE, report.prompt_tokens, report.stats.execution_time_s, self._clock.now_s())

    def lose(self) -> None:
        """The engine has ended."""
        self._holds.lose()

    @property
    def hold_names(self) -> set[str]:
        """What the engine's stock calls the blocks that it holds for this."""
        return set(self._holds.open)

    def held(self) -> list[Held]:
        return [Held(Kind.HOLD, name) for name in self._holds.open]

    def reset(self) -> None:
        """Forget what the connector keeps, as the engine forgets what nobody holds."""
        if self._offloader is not None:
            self._offloader.reset()
        self._connector.reset()

    async def _close_idle_channels(self) -> None:
        while True:
            await asyncio.sleep(IDLE_CHANNELS_PERIOD_S)
            await self._streams.close_idle()

    async def stop(self) -> None:
        await self._connector.close()
        await self._streams.close()
        if self._publisher is not None:
            await self._publisher.leave()
