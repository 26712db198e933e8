"""Both schedulers under any order of commands, steps and deadlines, over the canary, which checks every block.

The shell played here keeps its half of the contract: it writes wanted blocks between Reserved and its next word, and
answers a Failed with Release. Everything else it does in any order, late and repeated words included. `check`, which
runs after every command and every step, sees to the budgets and to it that nothing is passed over for too long.
"""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decode_nodes.scheduler import DecodeScheduler
from pipelines.runtime.messages import (
    Admit,
    Adopt,
    ChunkReady,
    Failed,
    FirstToken,
    Prefill,
    PrefillHere,
    Release,
    Reserved,
    ResetPrefixCache,
    TokenDelta,
)
from prefill_nodes.scheduler import PrefillScheduler
from pronghorn.ids import Fence
from tests.fakes.canary_engine import canary_config, canary_context
from tests.fakes.canary_pipeline import continuation, expected_block, write_blocks
from tests.fakes.engine_play import EnginePlay, fence

NAMES = ["a", "b", "c"]
NEW_TOKENS = 12

POLICIES = st.fixed_dictionaries(
    {
        "data_parallel": st.sampled_from([1, 2]),
        "scheduling_strategy": st.sampled_from([None, "prefill_first", "decode_first", "balanced", "per_replica"]),
        "enable_in_flight_batching": st.sampled_from([None, False, True]),
        "enable_chunked_prefill": st.booleans(),
        "chunked_prefill_min_chunk_size": st.sampled_from([0, 3, 8]),
        "max_batch_total_tokens": st.sampled_from([None, 24, 64]),
        "kv_pressure_fraction": st.sampled_from([0.0, 0.5, 0.9]),
        "max_passed_over_steps": st.sampled_from([1, 3, 32]),
        "enable_dp_cross_replica_prefix_copy": st.booleans(),
        "device_graph_capture": st.booleans(),
    }
)
"""Every policy keeps every promise."""

Move = tuple[str, str, int]
"""What, on which request, and a number that says how."""


def moves(*kinds: str) -> st.SearchStrategy[list[Move]]:
    move = st.tuples(st.sampled_from(kinds), st.sampled_from(NAMES), st.integers(0, 40))
    return st.lists(move, min_size=10, max_size=60)


def prompt_of(name: str, length: int) -> list[int]:
    """Prompts of two requests share their beginning, so that blocks are shared."""
    return [1 + NAMES.index(name) // 2, *range(10, 10 + length)]


class Shell:
    """The attempts that a play has begun, the newest of each name."""

    def __init__(self, engine: EnginePlay) -> None:
        self.engine = engine
        self.prompts: dict[Fence, list[int]] = {}
        self.delivered: dict[Fence, list[int]] = {}
        self.decided: set[Fence] = set()
        """Whose pull is over: the shell no longer writes, and only repeats itself."""
        self._attempts = dict.fromkeys(NAMES, 0)

    def begin(self, name: str, length: int) -> Fence:
        self._attempts[name] += 1
        one = fence(name, self._attempts[name])
        self.prompts[one] = prompt_of(name, length)
        self.delivered[one] = []
        return one

    def newest(self, name: str) -> Fence:
        return fence(name, self._attempts[name])

    def reserved(self, one: Fence) -> Reserved | None:
        return next((e for e in self.engine.events if isinstance(e, Reserved) and e.fence == one), None)

    def over(self, one: Fence) -> bool:
        return any(
            e.fence == one and (isinstance(e, Failed) or (isinstance(e, TokenDelta) and e.status.is_done))
            for e in self.engine.events
        )

    def end_pulls(self) -> None:
        """Answer what has failed, and let go of what was never decided, until all that is left has had its way."""
        self.engine.send(*(Release(one) for one in self.prompts if self.over(one)))
        self.engine.run()
        while pulled := [one for one in self.prompts if self.reserved(one) and not self.over(one)]:
            for one in pulled:
                self.engine.send(Release(one))
                del self.prompts[one]
            self.engine.run()

    def release_all(self) -> None:
        self.engine.send(*(Release(one) for one in self.prompts))
        load = self.engine.scheduler.load()
        assert (load.held_blocks, load.waiting, load.running, load.awaiting_blocks) == (0, 0, 0, 0)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    POLICIES,
    moves("pull", "local", "adopt", "here", "here_token", "release", "reset", "late", "sweep", "step", "step", "step"),
)
def test_decode_says_each_token_once_and_gives_every_block_back(policy: dict[str, object], script: list[Move]) -> None:
    engine = EnginePlay(canary_config(num_blocks=14, max_batch_size=3, max_waiting=3, **policy), DecodeScheduler)
    shell = Shell(engine)
    for kind, name, number in script:
        decode_move(shell, kind, name, number)
    engine.run()
    shell.end_pulls()
    for one, prompt in shell.prompts.items():
        said = [*shell.delivered[one], *engine.tokens_of(one)]
        assert said == continuation(prompt, len(said))
        engine.last_word_of(one)
    shell.release_all()


def decode_move(shell: Shell, kind: str, name: str, number: int) -> None:
    engine, one = shell.engine, shell.newest(name)
    match kind:
        case "pull" | "local":
            one = shell.begin(name, number)
            context = canary_context(shell.prompts[one], NEW_TOKENS, request_id=name)
            engine.send(Admit(one, context, 50.0, prefill_here=kind == "local"))
        case "adopt" | "here" | "here_token" if (
            one in shell.prompts and not shell.over(one) and (reserved := shell.reserved(one))
        ):
            prompt = shell.prompts[one]
            repeated = one in shell.decided
            shell.decided.add(one)
            if repeated or kind == "here":
                engine.send(PrefillHere(one))
                return
            wanted = {p: b for p, b in enumerate(reserved.block_ids) if p >= reserved.cached_blocks}
            written = wanted if kind == "adopt" else dict(list(wanted.items())[: number % 3])
            write_blocks(engine.memory, engine.config.block_tokens, prompt, written)
            (first,) = continuation(prompt, 1)
            engine.send(Adopt(one, first) if kind == "adopt" else PrefillHere(one, first))
            shell.delivered[one] = [first]
        case "release":
            engine.send(Release(one))
            shell.prompts.pop(one, None)
        case "reset":
            engine.send(ResetPrefixCache())
        case "late":
            engine.send(Release(fence("nobody")), Adopt(fence(name, 0), 3), PrefillHere(fence("nobody")))
        case "sweep":
            engine.sweep(float(number))
        case "step":
            engine.step()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(POLICIES, moves("prefill", "prefill", "release", "reset", "sweep", "step", "step", "step"))
def test_prefill_reports_right_blocks_once_and_keeps_them_until_release(
    policy: dict[str, object], script: list[Move]
) -> None:
    engine = EnginePlay(canary_config(num_blocks=14, max_batch_size=3, max_waiting=3, **policy), PrefillScheduler)
    shell = Shell(engine)
    for kind, name, number in script:
        one = shell.newest(name)
        match kind:
            case "prefill":
                one = shell.begin(name, number)
                blocks = -(-len(shell.prompts[one]) // engine.config.block_tokens)
                context = canary_context(shell.prompts[one], NEW_TOKENS, request_id=name)
                engine.send(Prefill(one, context, list(range(min(number % 3, blocks - 1), blocks)), 50.0))
            case "release":
                engine.send(Release(one))
                shell.prompts.pop(one, None)
            case "reset":
                engine.send(ResetPrefixCache())
            case "sweep":
                engine.sweep(float(number))
            case "step":
                engine.step()
        check_reported(shell)
    engine.run()
    check_reported(shell)
    shell.release_all()


def check_reported(shell: Shell) -> None:
    """What was reported and not released can be read, whatever became of the request."""
    engine = shell.engine
    for event in engine.events:
        prompt = shell.prompts.get(event.fence)
        if prompt is None:
            continue
        if isinstance(event, FirstToken):
            assert [event.token] == continuation(prompt, 1)
        elif isinstance(event, ChunkReady):
            for position, block in zip(event.positions, event.block_ids, strict=True):
                data = expected_block(prompt, position, engine.config.block_tokens)
                assert bytes(engine.memory.block(block)[: len(data)]) == data
