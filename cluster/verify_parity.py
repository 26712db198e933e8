"""`pronghorn verify parity`: the tokens of a running P/D cluster are those of one process, and one process's logits are
those of `transformers`. A process of its own, since it holds a model.

It speaks to the cluster's nodes as one more orchestrator, so that tokens are compared and not text, and it names the
prefill node (`target_endpoint`), so that no answer can come from a decode node that prefilled for itself.
"""

import argparse
import asyncio
import logging
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from cluster import config
from cluster.config import ServiceConfig
from cluster.run_folder import RunFolder, RunState
from cluster.verify_cases import ParityCase, Verdict, judge, parity_cases
from cluster.verify_features import cases_of, compare_feature, features, prompts
from cluster.verify_logits import LogitsReport, compare_logits, compare_random_model
from cluster.verify_outcome import Choice, Outcome, new_outcome
from cluster.verify_reference import OneProcess, greedy_context
from cluster.verify_structured import structured_features
from kvcache.redis_registry import RedisRegistry
from orchestrator.assembly import identify, start_replica
from orchestrator.config import OrchestratorConfig, parse_config
from orchestrator.ports import GenerationJob
from orchestrator.replica import Replica
from pipelines.runtime.config import EngineConfig
from pipelines.types.text_context import TextContext
from pronghorn.clock import SystemClock
from pronghorn.deadline import Deadline
from pronghorn.errors import ConfigurationError, PronghornError

SEED = 20260
TOKENS = 24
QUICK_TOKENS = 8
FEATURE_TOKENS = 12
REQUEST_S = 120.0
JOIN_S = 15.0
ROLES = ("prefill", "decode")


@dataclass
class TokensReport:
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    compared_tokens: int = 0
    warm_blocks: int = 0
    faults: list[str] = field(default_factory=list)


class Members:
    """The cluster's nodes, reached as an orchestrator reaches them."""

    def __init__(self, replica: Replica, orchestrator: OrchestratorConfig) -> None:
        self._replica = replica
        self._model = orchestrator.model_name
        self._clock = SystemClock()
        self.prefill_name = ""

    async def join(self) -> None:
        """Raises ConfigurationError where the cluster is not one that can be compared."""
        give_up_s = self._clock.now_s() + JOIN_S
        while True:
            names = {role: [n.name for n in self._replica.nodes() if n.role == role and n.healthy] for role in ROLES}
            if names["decode"] and names["prefill"]:
                break
            if self._clock.now_s() > give_up_s:
                raise ConfigurationError(f"parity needs a prefill and a decode node; there are {names}")
            await asyncio.sleep(0.05)
        if len(names["decode"]) != 1:
            raise ConfigurationError(f"parity needs one decode node, whose cache it warms; there are {names['decode']}")
        self.prefill_name = names["prefill"][0]

    async def answer(self, prompt: tuple[int, ...], num_tokens: int) -> tuple[list[int], int]:
        """The tokens, and how many of the prompt's were cached."""
        outcome = await self.run(greedy_context(prompt, num_tokens, self._model))
        return outcome.choices[0].tokens, outcome.cached_tokens

    async def run(self, context: TextContext) -> Outcome:
        """What becomes of `context`, prefilled on the named node. Raises the cluster's error."""
        deadline = Deadline.after(self._clock.now_s(), REQUEST_S)
        context.model_name = self._model
        job = GenerationJob(context, deadline, self._model, target_endpoint=self.prefill_name)
        outcome = new_outcome(context.num_choices)
        async with self._replica.generate(job) as outputs:
            async for output in outputs:
                outcome.take(output)
        return outcome


async def compare_tokens(
    members: Members,
    reference: OneProcess,
    cases: list[ParityCase],
    num_tokens: int,
    block_tokens: int,
    at_once: int,
    bar: Progress,
) -> TokensReport:
    """`at_once` cases are in the cluster at a time, so that each replica of an engine has its share."""
    report = TokensReport()
    task = bar.add_task("tokens", total=len(cases))
    for first in range(0, len(cases), at_once):
        together = cases[first : first + at_once]
        answers = await asyncio.gather(*(_answer_warm(members, case, num_tokens) for case in together))
        for case, (found, cached) in zip(together, answers, strict=True):
            expected = await reference.answer(case.prompt, num_tokens)
            _take_down(report, case, expected, found, cached, block_tokens)
            bar.advance(task)
    return report


async def _answer_warm(members: Members, case: ParityCase, num_tokens: int) -> tuple[list[int], int]:
    if case.warm_prompt is not None:
        await members.answer(case.warm_prompt, 1)
    return await members.answer(case.prompt, num_tokens)


def _take_down(
    report: TokensReport, case: ParityCase, expected: Choice, found: list[int], cached: int, block_tokens: int
) -> None:
    verdict, at = judge(expected.tokens, found, expected.gaps)
    report.verdicts[verdict] += 1
    report.compared_tokens += len(expected.tokens)
    report.warm_blocks += cached // block_tokens
    if verdict == "different":
        report.faults.append(f"{case}: token {at} differs: one process {expected.tokens}, the cluster {found}")
    if cached != case.warm_blocks * block_tokens:
        report.faults.append(f"{case}: {cached} tokens were cached")


async def verify(service: ServiceConfig, state: RunState, quick: bool, all_features: bool, console: Console) -> bool:
    """Whether all agreed, of one model; with `all_features` in the features, else in greedy tokens and logits.

    Raises PronghornError where it could not be found out.
    """
    if service.dtype != "float32":
        raise ConfigurationError(f"parity is a promise of float32; this cluster computes in {service.dtype}")
    engine = msgspec.convert(config.engine(service), EngineConfig)
    orchestrator = parse_config({**config.orchestrator(service), "redis_url": state.redis_url})
    registry = RedisRegistry(orchestrator.redis_url, orchestrator.key_prefix)
    reference = OneProcess(engine)
    identity = await identify("verify-parity", orchestrator, registry)
    replica = await start_replica(identity, orchestrator, registry)
    try:
        ready = await reference.start()
        members = Members(replica, orchestrator)
        await members.join()
        # The time is in the seed: a second run must not find the first one's prompts in the caches.
        seed = SEED + time.time_ns()
        if all_features:
            asked = list(prompts(engine.block_tokens, ready.vocab_size, seed, quick))
            return await verify_features(members, reference, asked, sorted(engine.logits_processors), console)
        cases = list(parity_cases(engine.block_tokens, ready.vocab_size, seed, quick))
        with Progress(console=console, transient=True) as bar:
            num_tokens = QUICK_TOKENS if quick else TOKENS
            tokens = await compare_tokens(
                members, reference, cases, num_tokens, engine.block_tokens, engine.data_parallel, bar
            )
    finally:
        await replica.drain()
        await replica.stop()
        await registry.close()
        await reference.stop()
    logits = [compare_logits(engine), compare_random_model(engine)]
    return show(tokens, logits, console)


async def verify_features(
    members: Members,
    reference: OneProcess,
    asked: Sequence[tuple[int, ...]],
    processors: Sequence[str],
    console: Console,
) -> bool:
    cases = await cases_of(asked, FEATURE_TOKENS, reference.run)
    table = Table("feature", "prompts", "tokens compared", "equal")
    faults: list[str] = []
    for feature in [*features(processors), *structured_features()]:
        report = await compare_feature(feature, cases, reference.run, members.run)
        table.add_row(report.name, str(report.prompts), str(report.compared_tokens), str(report.equal))
        faults += report.faults
    console.print(table)
    for fault in faults:
        console.print(f"  {fault}", soft_wrap=True, markup=False)
    return not faults


def show(tokens: TokensReport, logits: list[LogitsReport], console: Console) -> bool:
    compared = sum(tokens.verdicts.values())
    console.print(
        f"tokens: {compared} prompts, {tokens.compared_tokens} tokens compared, {tokens.warm_blocks} warm blocks; "
        f"{tokens.verdicts['equal']} equal, {tokens.verdicts['near tie']} apart at a near tie (tolerated), "
        f"{tokens.verdicts['different']} different"
    )
    for report in logits:
        console.print(str(report))
    for fault in tokens.faults:
        console.print(f"  {fault}", soft_wrap=True)
    return compared > 0 and not tokens.faults and all(report.agrees for report in logits)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("name")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--features", action="store_true")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.ERROR)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    folder = RunFolder(options.root, options.name)
    run, state = folder.run(), folder.state()
    try:
        if run is None or state is None or state.phase != "ready":
            raise ConfigurationError(f"no cluster {options.name!r} is ready on this machine")
        agreed = True
        for service in run.config.service.each:
            if run.config.service.models:
                console.print(f"model {service.model_name}")
            agreed &= asyncio.run(verify(service, state, options.quick, options.features, console))
    except PronghornError as error:
        console.print(f"[red]error:[/red] {error.message}", soft_wrap=True)
        return 1
    console.print("all agree" if agreed else "[red]they do not agree[/red]")
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
