"""Where a request goes next, and what its fate on a node says about where the next ones go.

Knows router, nodes and their breakers, and what a prompt's blocks are called. It sends nothing, and what becomes of a
request is its lifecycle's to decide.
"""

from orchestrator.breaker import counts_as_failure
from orchestrator.config import OrchestratorConfig
from orchestrator.explanation import Explanations
from orchestrator.flight import Flight, HandOver
from orchestrator.hints import routed_hint
from orchestrator.lifecycle import RequestState
from orchestrator.local_prefill import with_room
from orchestrator.nodes import Nodes
from orchestrator.picks import Picks
from orchestrator.prompt_keys import PromptBlocks, PromptKeys
from orchestrator.request_events import (
    AttemptFailed,
    Choose,
    Complete,
    Dispatch,
    Event,
    NodeGone,
    NodeUnfit,
    Produced,
    Routed,
    Unroutable,
)
from orchestrator.routing.facts import RequestFacts, Route
from orchestrator.routing.router import Router
from orchestrator.routing.speeds import LearnedSpeeds
from pipelines.types.frames import Pulled
from pronghorn.clock import Clock
from pronghorn.counters import Counters
from pronghorn.errors import NoPrefill, PronghornError, Unavailable, from_record
from pronghorn.ids import Fence, Incarnation

TAIL_STEPS = 3.0
"""Steps that may lie between a first and a second token while every block is there."""


class Placement:
    def __init__(
        self,
        router: Router,
        nodes: Nodes,
        picks: Picks,
        prompts: PromptKeys,
        speeds: LearnedSpeeds,
        explanations: Explanations,
        clock: Clock,
        counters: Counters,
        config: OrchestratorConfig,
    ) -> None:
        self._router = router
        self._nodes = nodes
        self._picks = picks
        self._prompts = prompts
        self._speeds = speeds
        self._explanations = explanations
        self._clock = clock
        self._counters = counters
        self._config = config

    def choose(self, flight: Flight, effect: Choose) -> Routed | Unroutable | Complete:
        """The answer to Choose."""
        if (status := flight.progress.status()).is_done:
            return Complete(status)
        views = self._nodes.views(self._clock.now_s())
        job = flight.job
        bounded = self._config.prefill_expected and job.target_endpoint is None
        usable = with_room(views, flight.progress.tokens) if bounded else views
        facts = RequestFacts(
            model=job.model,
            prompt_tokens=flight.progress.tokens,
            target_endpoint=job.target_endpoint,
            avoid=effect.avoid,
            keys=(blocks := self._blocks(flight)).keys,
            block_tokens=blocks.block_tokens,
            session=flight.job.session,
        )
        try:
            route = self._router.choose(facts, usable)
        except PronghornError as error:
            if usable == views or not isinstance(error, Unavailable):
                now_s, within_s = self._clock.now_s(), self._config.reconnect_wait_s
                back = isinstance(error, Unavailable) and self._nodes.reconnecting(within_s, now_s)
                return Unroutable(error, reconnecting=back)
            self._counters.count("prefill_fallback", "refused")
            return Unroutable(NoPrefill(error.message))
        if bounded and not route.prefill:
            could = any(view.role == "prefill" and view.unusable is None for view in views)
            self._counters.count("prefill_here" if could else "prefill_fallback", "sooner" if could else "local")
        flight.computes = (route.prefill[0] if route.prefill else route.decode).incarnation
        flight.hand_over = self._hand_over(route, facts.prompt_tokens)
        self._hint(flight, route)
        self._explanations.routed(flight.request_id, route, self._prompts.kv_bytes_per_token, self._clock.now_s())
        return Routed(route.decode.name, route.decode.incarnation, route.prefill, route.only_these)

    def _blocks(self, flight: Flight) -> PromptBlocks:
        """Hashed once a request, whatever becomes of its attempts."""
        if flight.blocks is None:
            context = flight.job.context
            if (layout := self._nodes.layout()) is not None:
                self._prompts.learn(layout)
            flight.blocks = self._prompts.blocks(context.tokens.all, context.cache_salt)
        return flight.blocks

    def _hint(self, flight: Flight, route: Route) -> None:
        """Tell the node who else holds what of the prompt. What the client knew stays behind what is known here."""
        assert flight.blocks is not None, "it was routed, so its blocks were named"
        hint = routed_hint(route.held_blocks, flight.blocks.hashes, self._prompts.name, flight.job.hint)
        flight.job.context.external_block_metadata = hint

    def _hand_over(self, route: Route, prompt_tokens: int) -> HandOver | None:
        if not route.prefill or route.choice is None:
            return None
        pair = route.choice.considered[0]
        rate = self._speeds.of(route.prefill[0].incarnation).prefill_tokens_per_s
        moved_bytes = (prompt_tokens - pair.decode.reuse_tokens) * self._prompts.kv_bytes_per_token
        compute_s = (prompt_tokens - route.choice.reuse_tokens) / rate
        return HandOver(route.decode.incarnation, moved_bytes, compute_s)

    # --- what becomes of it ---

    def delivered(self, flight: Flight) -> None:
        """Tokens came. The gap between the first two of a hand-over tells of the link that its blocks took."""
        hand_over, now_s = flight.hand_over, self._clock.now_s()
        if hand_over is None:
            return
        if hand_over.first_at_s is None:
            hand_over.first_at_s = now_s
            return
        tail_s = now_s - hand_over.first_at_s - TAIL_STEPS * self._speeds.of(hand_over.decode).step_s
        self._speeds.handed_over(hand_over.decode, hand_over.moved_bytes, hand_over.compute_s, tail_s)
        flight.hand_over = None

    def sent(self, flight: Flight, effect: Dispatch) -> None:
        """It goes there now: the node is counted busier, and what half-open breakers it may ask is theirs to try."""
        fence = effect.fence
        self._nodes.dispatched(fence.incarnation, 0 if effect.prefill else flight.progress.tokens)
        flight.asked = (fence.incarnation, *(target.incarnation for target in effect.prefill))
        self._nodes.asked(flight.asked, self._clock.now_s())

    def computed(self, flight: Flight) -> None:
        """Its prompt is computed, or will not be any more, where it was sent."""
        if flight.computes is not None:
            self._nodes.computed(flight.computes)
            flight.computes = None

    def ended(self, flight: Flight, fence: Fence) -> None:
        """That attempt is over, however it ended."""
        self._nodes.ended(fence.incarnation)
        self._let_go(flight)

    def note(self, incarnation: Incarnation, state: RequestState, event: Event) -> None:
        """What the event says of the node that the request was on, `state` being the one before."""
        now_s = self._clock.now_s()
        match event:
            case Produced() if state is RequestState.DISPATCHED:
                self._nodes.succeeded(incarnation, now_s)
                self._picks.note(True, now_s)
            case AttemptFailed(error=error) if counts_as_failure(error):
                self._nodes.failed(incarnation, now_s)
                if state is RequestState.DISPATCHED:
                    self._picks.note(False, now_s)
            case NodeGone() | NodeUnfit() if state is RequestState.DISPATCHED and incarnation == event.incarnation:
                self._picks.note(False, now_s)
            case _:
                pass

    def pulled(self, pulled: Pulled, flight: Flight | None) -> None:
        """A prefill node has served a request, or failed it, whatever has become of the request since."""
        now_s = self._clock.now_s()
        if pulled.error is None:
            self._nodes.succeeded(pulled.prefill, now_s)
            self._picks.note(True, now_s)
            if flight is not None:
                self._let_go(flight)
            return
        error = from_record(pulled.error)
        self._counters.count("prefill_failed", type(error).__name__)
        if counts_as_failure(error):
            self._nodes.failed(pulled.prefill, now_s)
            self._picks.note(False, now_s)

    def _let_go(self, flight: Flight) -> None:
        self._nodes.let_go(flight.asked)
        flight.asked = ()
