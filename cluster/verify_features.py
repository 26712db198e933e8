"""Every feature of generation, asked of a P/D cluster and of one process: `pronghorn verify parity --features`.

Knows how each feature is asked for, as a context; two ways to run a context come in as functions. The cluster is asked
all prompts of a feature at once and the one process one after the other, so that equal answers also say that nothing
depends on what else is in a batch.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cluster.verify_outcome import Outcome, difference
from pipelines.text.thinking_region import ThinkingMarkers
from pipelines.types.eos import EOSTracker
from pipelines.types.sampling import SamplingParams
from pipelines.types.text_context import TextContext
from pipelines.types.token_buffer import TokenBuffer

Run = Callable[[TextContext], Awaitable[Outcome]]


@dataclass(frozen=True)
class Case:
    """A prompt, and what one process says after it when it is asked for nothing special."""

    prompt: tuple[int, ...]
    plain: list[int]

    def context(self, *, more: dict[str, Any] | None = None, **params: Any) -> TextContext:
        """`more` are fields of the context. Nothing ends it before its length unless they say so."""
        new_tokens = len(self.plain)
        sampling = {"temperature": 0.0, "seed": 20260 + len(self.prompt), "max_new_tokens": new_tokens} | params
        return TextContext(
            max_length=len(self.prompt) + new_tokens,
            tokens=TokenBuffer(np.array(self.prompt, dtype=np.int64)),
            sampling_params=SamplingParams(**sampling),
            **(more or {}),
        )

    @property
    def common(self) -> int:
        """The token that greedy text says most often: what a bias or a penalty changes something about."""
        return max(self.plain, key=self.plain.count)


@dataclass(frozen=True)
class Feature:
    name: str
    ask: Callable[[Case], TextContext]


def _ends(*tokens: int, sequences: Sequence[list[int]] = ()) -> EOSTracker:
    return EOSTracker(eos_token_ids=set(tokens), eos_sequences=list(sequences))


def features(processors: Sequence[str] = ()) -> list[Feature]:
    """`processors` are those that the cluster's configuration names."""
    warm: dict[str, Any] = {"temperature": 0.9}
    return [
        Feature("greedy", lambda c: c.context()),
        Feature("seed", lambda c: c.context(temperature=1.0)),
        Feature("top_k, top_p, min_p", lambda c: c.context(temperature=1.3, top_k=40, top_p=0.9, min_p=0.02)),
        Feature("logprobs", lambda c: c.context(**warm, more={"log_probabilities": 5})),
        Feature(
            "echo with logprobs", lambda c: c.context(more={"log_probabilities": 3, "log_probabilities_echo": True})
        ),
        Feature("stop (as tokens)", lambda c: c.context(more={"eos_tracker": _ends(sequences=[c.plain[2:4]])})),
        Feature("stop_token_ids", lambda c: c.context(more={"eos_tracker": _ends(c.plain[-2])})),
        Feature("min_tokens", lambda c: c.context(min_new_tokens=5, more={"eos_tracker": _ends(*c.plain[:4])})),
        Feature("max_tokens of one", lambda c: _short(c)),
        Feature("logit_bias", lambda c: c.context(logit_bias={c.common: -100.0, c.plain[0] + 1: 4.0})),
        Feature("frequency_penalty", lambda c: c.context(frequency_penalty=1.5)),
        Feature("presence_penalty", lambda c: c.context(**warm, presence_penalty=1.2)),
        Feature("repetition_penalty", lambda c: c.context(repetition_penalty=1.4)),
        Feature("thinking_temperature", _thinking),
        Feature("n", lambda c: c.context(temperature=1.0, more={"num_choices": 3})),
        Feature("n with logprobs and ends", lambda c: _choices_that_end(c)),
        *(
            Feature(f"logits_processors: {name}", lambda c, name=name: c.context(**warm, logits_processors=[name]))  # type: ignore[misc]  # a name of its own each
            for name in processors
        ),
    ]


def _short(case: Case) -> TextContext:
    context = case.context(temperature=1.0)
    context.max_length = len(case.prompt) + 1
    return context


def _thinking(case: Case) -> TextContext:
    """The prompt opens a region, and the third token that greedy text says closes it."""
    markers = ThinkingMarkers([case.prompt[-1]], [case.plain[2]])
    return case.context(temperature=0.0, thinking_temperature=1.2, more={"thinking_markers": markers})


def _choices_that_end(case: Case) -> TextContext:
    """Each choice where it says one of these for the first time, if it does."""
    ends = _ends(*case.plain[1::2])
    return case.context(
        temperature=0.8,
        frequency_penalty=0.5,
        more={"num_choices": 4, "log_probabilities": 2, "log_probabilities_echo": True, "eos_tracker": ends},
    )


def prompts(block_tokens: int, vocab_size: int, seed: int, quick: bool) -> Iterator[tuple[int, ...]]:
    """Around block borders, each of its own random tokens."""
    rng = random.Random(seed)
    for blocks in (2,) if quick else (1, 3, 5):
        for offset in (-1, 0, 1):
            yield tuple(rng.randrange(vocab_size) for _ in range(blocks * block_tokens + offset))


@dataclass
class FeatureReport:
    name: str
    prompts: int = 0
    compared_tokens: int = 0
    equal: int = 0
    faults: list[str] = field(default_factory=list)


async def compare_feature(feature: Feature, cases: Sequence[Case], one_process: Run, cluster: Run) -> FeatureReport:
    report = FeatureReport(feature.name)
    expected = [await one_process(feature.ask(case)) for case in cases]
    found = await asyncio.gather(*(cluster(feature.ask(case)) for case in cases))
    for case, ours, theirs in zip(cases, expected, found, strict=True):
        report.prompts += 1
        report.compared_tokens += sum(len(choice.tokens) for choice in ours.choices)
        report.compared_tokens += 0 if ours.prompt is None else len(ours.prompt.sampled_token_ids)
        if (fault := difference(ours, theirs)) is None:
            report.equal += 1
        else:
            report.faults.append(f"{feature.name}, {len(case.prompt)} tokens: {fault}")
    return report


async def cases_of(all_prompts: Iterable[tuple[int, ...]], num_tokens: int, one_process: Run) -> list[Case]:
    cases = []
    for prompt in all_prompts:
        plain = await one_process(Case(prompt, [0] * num_tokens).context())
        cases.append(Case(prompt, plain.choices[0].tokens))
    return cases
