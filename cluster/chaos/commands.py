"""`pronghorn chaos`: flags in, a table out, exit code 1 where something does not hold."""

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from importlib import resources
from pathlib import Path
from types import FrameType
from typing import Annotated, TypeVar

import msgspec
import typer
from rich.console import Console

from cluster import config, model, signals
from cluster.chaos import namespaces, report
from cluster.chaos.local_site import local_site
from cluster.chaos.own_cluster import own_cluster
from cluster.chaos.runner import Outcome, Runner
from cluster.chaos.scenario import Cluster, NamespaceFault, Scenario, aim_of, kind_of, read
from cluster.chaos.site import Site
from cluster.chaos.soak import Soak, Soaked
from cluster.config_problems import nearest
from pronghorn.errors import ConfigurationError

chaos_app = typer.Typer(no_args_is_help=True, help="Faults on a real cluster under load, and what must hold after.")

out = Console(width=None if sys.stdout.isatty() else 160)
err = Console(stderr=True, width=None if sys.stderr.isatty() else 160)

SUFFIX = ".yaml"
MOST_STARTS = 3
"""Of a cluster of its own, where one falls apart under a scenario."""
SOAKED = Cluster(prefill=2, decode=2, orchestrators=2)
Target = Annotated[
    str | None, typer.Option(help="URL of the cluster it is done to.", show_default="one of its own, on this machine")
]
Seed = Annotated[int | None, typer.Option(help="Of prompts, moments and victims.", show_default="a new one")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs; the table goes to stderr then.", show_default="no")]
Result = TypeVar("Result")


@chaos_app.command("list")
def list_scenarios() -> None:
    """The scenarios that come with Pronghorn."""
    for scenario in library():
        faults = ", ".join(f"{kind_of(fault)} {aim_of(fault)}".strip() for fault in scenario.faults)
        out.print(f"{scenario.name}: {scenario.about.strip()} ({faults})", markup=False, highlight=False)


@chaos_app.command("run")
def run(
    scenarios: Annotated[list[str] | None, typer.Argument(help="Files, or names of `pronghorn chaos list`.")] = None,
    all_of_them: Annotated[bool, typer.Option("--all", help="Every scenario of the list.", show_default="no")] = False,
    target: Target = None,
    seed: Seed = None,
    as_json: AsJson = False,
    timelines: Annotated[
        Path | None, typer.Option(help="A file that each request's timeline is added to, as a JSON line.")
    ] = None,
) -> None:
    """Run scenarios, one after another on one cluster, where they can share it."""
    chosen = [*(library() if all_of_them else []), *(find(name) for name in scenarios or [])]
    if not chosen:
        raise ConfigurationError("say which scenario, or --all; `pronghorn chaos list` names them")
    if target is None and wants_namespaces(chosen):
        model.find(None, config.cache_dir(config.environment()), lambda _: None)  # in there nothing can be fetched
        namespaces.enter(sys.argv[1:])
    outcomes: list[Outcome] = []
    try:
        to_its_end(_run(chosen, target, _seed(seed), timelines, outcomes))
    finally:  # also of a run that is interrupted, whatever has ended is shown
        report.show(outcomes, err if as_json else out)
        if as_json:
            sys.stdout.write(msgspec.json.format(msgspec.json.encode(outcomes), indent=2).decode() + "\n")
    refused_all = all(outcome.refused is not None for outcome in outcomes)
    raise typer.Exit(1 if refused_all or any(not outcome.ok for outcome in outcomes) else 0)


@chaos_app.command("soak")
def soak(
    minutes: Annotated[float, typer.Option(help="How long.", min=0.5)] = 30.0,
    every: Annotated[float, typer.Option(help="Seconds from one fault to the next.", min=1.0)] = 20.0,
    target: Target = None,
    seed: Seed = None,
    as_json: AsJson = False,
) -> None:
    """Mixed load and random faults for a long time: nothing lost, wrong or left over, and memory does not grow."""
    soaked = to_its_end(_soak(target, minutes, every, _seed(seed)))
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(soaked), indent=2).decode() + "\n")
    else:
        report.show_soaked(soaked, out)
    raise typer.Exit(1 if soaked.failures else 0)


def wants_namespaces(chosen: list[Scenario]) -> bool:
    """Whether it must be entered, and can be."""
    needed = any(isinstance(fault, NamespaceFault) for scenario in chosen for fault in scenario.faults)
    return needed and not namespaces.is_entered() and namespaces.why_not() is None


async def _soak(target: str | None, minutes: float, every_s: float, seed: int) -> Soaked:
    async with site_of(target, SOAKED) as site:
        return await Soak(site, minutes, every_s, seed, say).run()


async def _run(
    chosen: list[Scenario], target: str | None, seed: int, timelines: Path | None, outcomes: list[Outcome]
) -> None:
    for together in by_cluster(chosen, namespaces.is_entered()) if target is None else [chosen]:
        await _run_together(together, target, seed, timelines, outcomes)


async def _run_together(
    chosen: list[Scenario], target: str | None, seed: int, timelines: Path | None, outcomes: list[Outcome]
) -> None:
    left = list(chosen)
    for start in range(1, MOST_STARTS + 1):
        async with site_of(target, largest(chosen)) as site:
            runner = Runner(site, seed, say)
            while left:
                scenario = left.pop(0)
                outcome = await runner.run(scenario)
                report.show_end(outcome, err)
                outcomes.append(outcome)
                if timelines is not None:
                    report.write_timelines(timelines, scenario.name, runner.requests)
                if outcome.broken_off and target is None and start < MOST_STARTS:
                    break  # the others get a cluster that works
        if not left:
            return


def to_its_end(work: Coroutine[object, object, Result]) -> Result:
    """An interrupt cancels it once, and however many follow: what it started, stopped or cut is put right. Raises
    KeyboardInterrupt then."""

    async def main() -> Result:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        told: list[int] = []

        def interrupted(number: int, _: FrameType | None) -> None:
            if not told:
                loop.call_soon_threadsafe(task.cancel)
            told.append(number)

        signals.listen(interrupted)
        return await work

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


@asynccontextmanager
async def site_of(target: str | None, size: Cluster) -> AsyncIterator[Site]:
    root = config.home(config.environment())
    if target is None:
        async with own_cluster(root, size, say) as own:
            yield own
        return
    site = local_site(root, target) or Site(target)
    await site.connect()
    try:
        yield site
    finally:
        await site.close()


def library() -> list[Scenario]:
    folder = resources.files("cluster.chaos") / "scenarios"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(SUFFIX)), key=lambda file: file.name)
    return [read(file.read_text(), file.name.removesuffix(SUFFIX)) for file in files]


def find(name: str) -> Scenario:
    """A file, or a scenario of the library. Raises ConfigurationError."""
    path = Path(name)
    if path.is_file():
        return read(path.read_text(), path.stem)
    known = {scenario.name: scenario for scenario in library()}
    if name not in known:
        raise ConfigurationError(f"{name!r} is neither a file nor a known scenario{nearest(name, known)}")
    return known[name]


def by_cluster(chosen: list[Scenario], disks_granted: bool = True) -> list[list[Scenario]]:
    """Those that can share a cluster of ours: links are cut on one machine, several are another Ray, and a disk takes
    time from whoever does not ask for one."""
    groups: dict[tuple[bool, bool], list[Scenario]] = {}
    for scenario in chosen:
        several, on_disk = scenario.cluster.machines > 1, disks_granted and scenario.cluster.disks > 0
        groups.setdefault((several, on_disk), []).append(scenario)
    return [groups[key] for key in sorted(groups)]


def largest(chosen: list[Scenario]) -> Cluster:
    """One that all of them can run on."""
    pools = {pool: max(getattr(s.cluster, pool) for s in chosen) for pool in Cluster.__struct_fields__}
    return Cluster(**pools)


def say(text: str) -> None:
    err.print(text, markup=False, highlight=False, soft_wrap=True)


def _seed(given: int | None) -> int:
    seed = secrets.randbelow(2**31) if given is None else given
    say(f"seed {seed}")
    return seed
