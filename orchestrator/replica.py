"""What an orchestrator replica is made of for one model, its HTTP side aside: put together, started, drained, stopped.

It names the concrete parts of this room and is handed what reaches outside (registry, connector, clock).
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from random import Random

from kvcache.registry import NodeRegistry
from orchestrator.breaker import BreakerPolicy
from orchestrator.config import OrchestratorConfig
from orchestrator.dispatcher import Dispatcher
from orchestrator.explanation import Explanations, RequestRecord
from orchestrator.gate import Gate
from orchestrator.holdings import Holdings
from orchestrator.membership import Membership
from orchestrator.nodes import Nodes, NodeView
from orchestrator.picks import Picks
from orchestrator.placement import Placement
from orchestrator.ports import GenerationJob, ModelState, NodeConnector
from orchestrator.prompt_keys import PromptKeys
from orchestrator.routing.pick import Turn
from orchestrator.routing.policies import Setting, make_policy
from orchestrator.routing.reservation import Reservations
from orchestrator.routing.router import PolicyRouter
from orchestrator.routing.speeds import LearnedSpeeds
from pipelines.types.frames import NodeReport
from pipelines.types.text_output import TextGenerationOutput
from pronghorn.clock import Clock
from pronghorn.counters import Counters
from pronghorn.ledger import Held

STOP_GRACE_S = 3.0
SYNCED_S = 5.0
"""A replica that is new waits so long for what its nodes hold, and then serves without the rest of it."""


class Replica:
    """Implements `ports.Generator` and `ports.ClusterView`."""

    def __init__(
        self,
        config: OrchestratorConfig,
        registry: NodeRegistry,
        connector: NodeConnector,
        clock: Clock,
        *,
        seed: bytes | None = None,
        random: Random | None = None,
    ) -> None:
        """`seed` is the cluster's hash seed; without it prompts are routed blind to caches. `random` is of this
        replica alone, so that replicas do not all begin with the same node."""
        self.model = config.model_name
        self._config = config
        self._clock = clock
        self._started_at_s = clock.now_s()
        self._synced = False  # once: what is lost later is one node's, and no reason to turn requests away
        self._counters = Counters()
        breaker = BreakerPolicy(config.breaker_failures, config.breaker_open_s, 8 * config.breaker_open_s)
        reservations, speeds = Reservations(), LearnedSpeeds()
        random = random or Random(0)
        self.explanations = Explanations()
        self.holdings = Holdings(config.block_index_bytes, self._counters)
        self._seed = seed
        prompt_keys = PromptKeys(config.hash_algo, seed if config.prefix_caching else None, config.model_name)
        setting = Setting(random, speeds.of, lambda: prompt_keys.kv_bytes_per_token, config.disaggregation == "always")
        self._picks = Picks()
        self._nodes = Nodes(config.model_name, config.heartbeat_timeout_s, breaker, reservations)
        self.membership = Membership(config, registry, connector, self._nodes, clock, self._counters)
        router = PolicyRouter(
            make_policy(config.policy, setting),
            self.holdings,
            reservations,
            clock,
            Turn(random),
            max_prefill_candidates=config.max_prefill_candidates,
            retry_after_s=config.retry_after_s,
        )
        self.dispatcher = Dispatcher(
            gate=Gate(config, self._nodes, speeds, clock, self._counters),
            placement=Placement(
                router,
                self._nodes,
                self._picks,
                prompt_keys,
                speeds,
                self.explanations,
                clock,
                self._counters,
                config,
            ),
            holdings=self.holdings,
            speeds=speeds,
            explanations=self.explanations,
            nodes=self._nodes,
            sessions=self.membership,
            clock=clock,
            counters=self._counters,
            config=config,
        )

    def start(self) -> None:
        """Begin to look for nodes. Within a running event loop, once."""
        self.membership.start(self.dispatcher, self._seed)

    async def drain(self) -> None:
        """Take no new requests; return when the old ones have ended, within `drain_s`."""
        await self.dispatcher.drain(self._config.drain_s)

    async def stop(self) -> None:
        """Drop what is left of the requests and close the sessions."""
        await self.dispatcher.drain(0.0)
        await self.membership.stop(STOP_GRACE_S)

    def generate(self, job: GenerationJob) -> AbstractAsyncContextManager[AsyncIterator[TextGenerationOutput]]:
        return self.dispatcher.generate(job)

    def nodes(self) -> list[NodeReport]:
        return self._nodes.reports(self._clock.now_s())

    def views(self) -> list[NodeView]:
        """The nodes as the router sees them now."""
        return self._nodes.views(self._clock.now_s())

    def held(self) -> list[Held]:
        """Everything that this replica holds."""
        return self.dispatcher.held() + self.membership.held()

    def ready(self) -> tuple[bool, str]:
        usable = [node.role for node in self.views() if node.unusable is None]
        decode, prefill = usable.count("decode"), usable.count("prefill")
        said = [f"{decode} decode and {prefill} prefill nodes are usable"]
        if self._config.prefill_expected and not prefill:
            said.append("decode nodes compute the prompts")
        if not self.membership.registry_answers:
            said.append("the node registry does not answer")
        unready = self._unready(decode)
        return not unready, "; ".join(said + unready)

    def _unready(self, usable_decode: int) -> list[str]:
        """Every reason for which no request could be served now, or not as well as in a moment. A single node's death
        is none."""
        reasons = []
        if usable_decode == 0:
            reasons.append("no decode node is usable")
        elif not self._synced:
            behind = self.holdings.behind(self.nodes())
            self._synced = not behind or self._clock.now_s() - self._started_at_s > SYNCED_S
            if not self._synced:
                reasons.append(f"the blocks of {', '.join(behind)} are not known yet")
        if self.dispatcher.draining:
            reasons.append("shutting down")
        if (failure := self.failure()) is not None:
            reasons.append(f"its node membership ended: {failure!r}")
        return reasons

    def degraded(self) -> str | None:
        return self._picks.degraded(self._clock.now_s())

    def models(self) -> list[ModelState]:
        is_ready, reason = self.ready()
        return [ModelState(self.model, is_ready, reason, self.in_flight())]

    def counters(self) -> dict[str, int]:
        return self._counters.snapshot()

    def explain(self, request_id: str) -> RequestRecord | None:
        return self.explanations.find(request_id)

    def gauges(self) -> dict[str, int]:
        return self.holdings.gauges() | self.dispatcher.gauges()

    def in_flight(self) -> int:
        return self.dispatcher.in_flight()

    async def reset_prefix_cache(self) -> None:
        self.dispatcher.drop_prefix_caches()

    def failure(self) -> BaseException | None:
        """What has broken this replica for good, if anything: only a bug can."""
        return self.membership.failure
