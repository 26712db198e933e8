"""The decode scheduler with requests for several choices, under any order of commands, steps and deadlines, over the
canary, which checks every block. A small pool and few slots, so that choices wait, are preempted and move on."""

from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decode_nodes.scheduler import DecodeScheduler
from pipelines.runtime.messages import Admit, Adopt, Failed, PrefillHere, Release, Reserved, TokenDelta
from pipelines.types.sampled_token import SampledToken
from pronghorn.ids import Fence
from tests.fakes.canary_engine import canary_config, canary_context
from tests.fakes.canary_pipeline import VOCAB_SIZE, continuation, write_blocks
from tests.fakes.engine_play import EnginePlay, fence

NAMES = ["a", "b", "c"]
NEW_TOKENS = 7
MOVES = ["pull", "local", "adopt", "here", "here_tokens", "release", "sweep", "step", "step", "step", "step"]


@dataclass(eq=False)
class Asked:
    fence: Fence
    prompt: list[int]
    choices: int
    decided: bool = False
    delivered: list[int] = field(default_factory=list)
    """First tokens, by choice, that the shell has told already."""

    def answer(self, choice: int) -> list[int]:
        first = (continuation(self.prompt, 1)[0] + choice) % VOCAB_SIZE
        return [first, *continuation([*self.prompt, first], NEW_TOKENS - 1)]

    def deltas(self, engine: EnginePlay, choice: int) -> list[TokenDelta]:
        ours = (e for e in engine.events if isinstance(e, TokenDelta) and e.fence == self.fence)
        return [delta for delta in ours if delta.choice == choice]

    def failures(self, engine: EnginePlay) -> int:
        return sum(isinstance(e, Failed) and e.fence == self.fence for e in engine.events)

    def check(self, engine: EnginePlay, *, whole: bool) -> None:
        failures = self.failures(engine)
        assert failures <= 1
        for choice in range(self.choices):
            deltas = self.deltas(engine, choice)
            said = [*self.delivered[choice : choice + 1], *(token for delta in deltas for token in delta.tokens)]
            assert said == self.answer(choice)[: len(said)]
            ends = [delta.status.is_done for delta in deltas]
            assert True not in ends[:-1], "nothing comes after a choice's last word"
            assert not whole or failures or (ends[-1:] == [True] and len(said) == NEW_TOKENS)


class Shell:
    def __init__(self, engine: EnginePlay) -> None:
        self.engine = engine
        self.newest: dict[str, Asked] = {}
        self.released: set[Fence] = set()
        self.all: list[Asked] = []

    def admit(self, name: str, number: int, *, here: bool) -> None:
        attempt = 1 + sum(asked.fence.request_id.value == name for asked in self.all)
        asked = Asked(fence(name, attempt), [1 + NAMES.index(name) // 2, *range(10, 10 + number)], 1 + number % 4)
        asked.decided = here
        self.newest[name] = asked
        self.all.append(asked)
        context = canary_context(asked.prompt, NEW_TOKENS, request_id=name)
        context.num_choices = asked.choices
        self.engine.send(Admit(asked.fence, context, 50.0, prefill_here=here))

    def decide(self, asked: Asked, kind: str) -> None:
        reserved = next((e for e in self.engine.events if isinstance(e, Reserved) and e.fence == asked.fence), None)
        if reserved is None or asked.decided or asked.failures(self.engine) or asked.fence in self.released:
            return
        asked.decided = True
        if kind == "here":
            self.engine.send(PrefillHere(asked.fence))
            return
        asked.delivered = [asked.answer(choice)[0] for choice in range(asked.choices)]
        first, *siblings = (SampledToken(token) for token in asked.delivered)
        if kind == "adopt":
            wanted = {p: b for p, b in enumerate(reserved.block_ids) if p >= reserved.cached_blocks}
            write_blocks(self.engine.memory, self.engine.config.block_tokens, asked.prompt, wanted)
        word = Adopt if kind == "adopt" else PrefillHere
        self.engine.send(word(asked.fence, first.token, None, siblings))

    def release(self, asked: Asked) -> None:
        self.released.add(asked.fence)
        self.engine.send(Release(asked.fence))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.sampled_from(MOVES), st.sampled_from(NAMES), st.integers(0, 20)), min_size=10, max_size=60),
    st.booleans(),
    st.sampled_from([1, 2]),
)
def test_every_choice_says_each_token_once_and_every_block_comes_back(
    script: list[tuple[str, str, int]], caching: bool, replicas: int
) -> None:
    config = canary_config(num_blocks=12, max_batch_size=3, enable_prefix_caching=caching, data_parallel=replicas)
    shell = Shell(engine := EnginePlay(config, DecodeScheduler))
    for kind, name, number in script:
        asked = shell.newest.get(name)
        if kind in ("pull", "local"):
            shell.admit(name, number, here=kind == "local")
        elif kind == "step":
            engine.step()
        elif kind == "sweep":
            engine.sweep(float(number))
        elif asked is not None and kind == "release":
            shell.release(asked)
        elif asked is not None:
            shell.decide(asked, kind)
        for each in shell.all:
            each.check(engine, whole=False)
    while open_pulls := [a for a in shell.all if not a.decided and a.fence not in shell.released]:
        engine.run()
        for asked in open_pulls:
            shell.release(asked)
    for asked in shell.all:
        if asked.failures(engine):
            shell.release(asked)
    engine.run()
    for asked in shell.all:
        asked.check(engine, whole=asked.fence not in shell.released)
        shell.release(asked)
    load = engine.scheduler.load()
    assert (load.held_blocks, load.waiting, load.running, load.awaiting_blocks) == (0, 0, 0, 0)
