"""Those who ask: each request of a plan as its client lives it, and what came of it.

A client runs within its orchestrator's process, where the HTTP side would. Knows the public port of the replica only.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cluster.simulator.canary import VOCAB_SIZE, canary_layout, continuation, first_token
from cluster.simulator.hosts import CLUSTER_SEED, MODEL, SimOrchestrator
from cluster.simulator.plan import BLOCK_TOKENS, RequestPlan
from cluster.simulator.story import Story
from kvcache.connector import HINT_VERSION
from kvcache.hashing import BlockHasher
from orchestrator.ports import GenerationJob
from pipelines.types.eos import EOSTracker
from pipelines.types.text_context import TextContext
from pipelines.types.token_buffer import TokenBuffer
from pronghorn.deadline import Deadline
from pronghorn.errors import PronghornError
from pronghorn.ids import RequestID


@dataclass(eq=False)
class Outcome:
    plan: RequestPlan
    story: Story
    orchestrator: SimOrchestrator | None = None
    started_s: float = 0.0
    paused_s: float = 0.0
    """Of its orchestrator, when it began."""
    said: dict[int, list[int]] = field(default_factory=dict)
    """By choice."""
    done: set[int] = field(default_factory=set)
    """Choices whose last output said so."""
    ends: list[str] = field(default_factory=list)
    error: PronghornError | None = None
    ended_s: float = 0.0

    def end(self, how: str, now_s: float, error: PronghornError | None = None) -> None:
        self.ends.append(how)
        self.error = error
        self.ended_s = now_s
        said = f": {type(error).__name__} ({error.code})" if error is not None else ""
        self.story.tell(f"{self.plan.name} {how} after {len(self.tokens)} tokens{said}")

    @property
    def tokens(self) -> list[int]:
        """Of all choices, one after another."""
        return [token for choice in sorted(self.said) for token in self.said[choice]]

    @property
    def answers(self) -> list[list[int]]:
        """What the canary says, whatever happens on the way, choice by choice."""
        return [self._answer(choice) for choice in range(self.plan.choices)]

    def _answer(self, choice: int) -> list[int]:
        first = first_token(self.plan.prompt, choice)
        tokens = [first, *continuation([*self.plan.prompt, first], self.plan.new_tokens - 1)]
        if self.plan.eos is not None and self.plan.eos in tokens:
            return tokens[: tokens.index(self.plan.eos) + 1]
        return tokens


def job(plan: RequestPlan, now_s: float) -> GenerationJob:
    context = TextContext(
        request_id=RequestID(plan.name),
        tokens=TokenBuffer(np.array(plan.prompt, dtype=np.int64)),
        max_length=len(plan.prompt) + plan.new_tokens,
        eos_tracker=EOSTracker(eos_token_ids=set() if plan.eos is None else {plan.eos}),
        vocab_size=VOCAB_SIZE,
        cache_salt=plan.salt,
        model_name=MODEL,
        num_choices=plan.choices,
    )
    deadline = Deadline.after(now_s, plan.budget_s)
    return GenerationJob(context, deadline, MODEL, plan.target_endpoint, _hint(plan))


def _hint(plan: RequestPlan) -> dict[str, Any] | None:
    if not plan.hint:
        return None
    hasher = BlockHasher("sha256", CLUSTER_SEED, MODEL, None, canary_layout(BLOCK_TOKENS))
    hashes = hasher.chain(np.array(plan.prompt, dtype=np.uint32), hasher.root(plan.salt))
    instances = [
        {"name": name, "blocks": blocks, "last_hash": hashes[blocks - 1].hex()} for name, blocks in plan.hint.items()
    ]
    return {"version": HINT_VERSION, "instances": instances}


def begin(outcome: Outcome, orchestrator: SimOrchestrator) -> None:
    loop = asyncio.get_running_loop()
    outcome.orchestrator = orchestrator
    task = orchestrator.process.start(_ask(outcome, orchestrator), f"client-{outcome.plan.name}")
    if outcome.plan.cancel_after_s is not None:
        context = orchestrator.process.context()
        loop.call_later(outcome.plan.cancel_after_s, task.cancel, context=context)


async def _ask(outcome: Outcome, orchestrator: SimOrchestrator) -> None:
    loop = asyncio.get_running_loop()
    outcome.started_s = loop.time()
    outcome.paused_s = orchestrator.paused_s
    try:
        async with orchestrator.replica.generate(job(outcome.plan, orchestrator.clock.now_s())) as outputs:
            how = "finished"
            async for output in outputs:
                outcome.said.setdefault(output.choice, []).extend(output.tokens)
                if output.is_done:
                    outcome.done.add(output.choice)
                wanted = outcome.plan.stop_after_tokens
                if wanted is not None and len(outcome.tokens) >= wanted:
                    how = "stopped"
                    break
                if outcome.plan.read_delay_s:
                    await asyncio.sleep(outcome.plan.read_delay_s)
        outcome.end(how, loop.time())
    except PronghornError as error:
        outcome.end("failed", loop.time(), error)
    except asyncio.CancelledError:
        outcome.end("cancelled", loop.time())
        raise
