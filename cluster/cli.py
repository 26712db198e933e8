"""The `pronghorn` command: flags in, one line per error out. What it does lives in the files that it names."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from cluster import chat as conversation
from cluster import config, flags, host_commands, scaling, signals
from cluster import drain as leaving
from cluster import status as state_of_cluster
from cluster import verify_ledger as audit
from cluster.announce import Announcement, Terminal
from cluster.chaos.commands import chaos_app
from cluster.config import DEFAULT_CLUSTER_NAME
from cluster.config_sources import variable
from cluster.driver import Change
from cluster.launch import prepare
from cluster.model import find, served_name
from cluster.run_folder import Run, RunFolder, RunState, names
from cluster.shutdown import take_down
from cluster.simulator import fault_report, load_report
from pronghorn.errors import ConfigurationError, PronghornError

ABOUT = "A prefill/decode serving cluster on this machine: start it, ask it, look at it, end it."

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=ABOUT)
model_app = typer.Typer(no_args_is_help=True, help="The model on this machine.")
verify_app = typer.Typer(
    no_args_is_help=True, help="Proof that a cluster computes what one process does, and keeps nothing."
)
app.add_typer(model_app, name="model")
app.add_typer(verify_app, name="verify")
app.add_typer(host_commands.config_app, name="config")
app.add_typer(chaos_app, name="chaos")

out = Console(width=None if sys.stdout.isatty() else 160)
err = Console(stderr=True)

Name = Annotated[str, typer.Option(envvar=variable(("name",)), help="Which cluster of this machine.")]
ModelOption = Annotated[
    str | None,
    typer.Option(help="A Hugging Face folder, GGUF file or hub name.", show_default=f"{served_name(None)}, fetched"),
]
ServedOption = Annotated[
    str | None, typer.Option("--model", help="Which of the models that it serves.", show_default="the only one")
]
Url = Annotated[str | None, typer.Option(help="Where the cluster answers.", show_default="that of --name")]


@app.command()
@flags.taken
def up(
    detach: Annotated[
        bool,
        typer.Option("--detach", help="Return once ready; `pronghorn down` ends it.", show_default="stay with it"),
    ] = False,
    print_serve_config: Annotated[
        bool,
        typer.Option("--print-serve-config", help="Start nothing: print what `serve deploy` takes.", show_default="no"),
    ] = False,
    **given: Any,
) -> None:
    """Start a cluster on this machine. Ctrl-C drains and ends it; a second one does not wait."""
    wanted = host_commands.settings(given).config()
    if print_serve_config:
        host_commands.print_serve_config(wanted)
        return
    signals.listen(signals.interrupt)
    terminal = Terminal(out)
    launch = prepare(wanted, terminal)
    terminal(Announcement("ended"))
    if not detach:
        launch.become()
    raise typer.Exit(0 if launch.detach(terminal) else 1)


@app.command()
def down(name: Name = DEFAULT_CLUSTER_NAME) -> None:
    """End a cluster of this machine, and whatever a killed one left behind."""
    terminal = Terminal(out)
    found = take_down(_folder(name), terminal)
    terminal(Announcement("ended", f"the cluster {name!r} has ended" if found else f"no cluster {name!r} runs here"))


@app.command()
def drain(
    node: Annotated[str, typer.Argument(help="Its name or address, or the beginning of either.")],
    name: Name = DEFAULT_CLUSTER_NAME,
    timeout: Annotated[
        float | None,
        typer.Option(help="Seconds for what runs there; the rest goes on elsewhere.", show_default="--drain-timeout"),
    ] = None,
    replace: Annotated[bool, typer.Option(help="Whether Serve starts another in its place.")] = True,
) -> None:
    """Let one node leave: it takes nothing new, ends what it runs, and goes."""
    terminal = Terminal(err)
    run, state = _running(name)
    assert state.redis_url is not None
    found = asyncio.run(leaving.find(state.redis_url, run.config.service.key_prefix, node, alone=replace))
    grace_s = run.config.service.drain_timeout_s if timeout is None else timeout
    with terminal.failing():
        asyncio.run(leaving.drain(found, grace_s, grace_s + leaving.STOP_MARGIN_S, terminal, run.config.service.tls))
        if not replace:
            change = Change(scaling.limit_s(run), without=found.name)
            scaling.change(run, state, change, f"telling Serve not to replace {found.name}", terminal)
    out.print(f"{found.name} has left", highlight=False)


@app.command()
def scale(
    name: Name = DEFAULT_CLUSTER_NAME,
    model: ServedOption = None,
    prefill: Annotated[int | None, typer.Option(help="Prefill nodes.", show_default="as many as now")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode nodes.", show_default="as many as now")] = None,
    orchestrators: Annotated[int | None, typer.Option(help="HTTP replicas.", show_default="as many as now")] = None,
) -> None:
    """Change the size of a running cluster's pools, those of one of its models. Nodes that go are drained first."""
    asked = {role: size for role, size in (("prefill", prefill), ("decode", decode)) if size is not None}
    if not asked and orchestrators is None:
        raise ConfigurationError("say which pool: --prefill, --decode or --orchestrators")
    run, _ = _running(name)
    sizes = scaling.sizes(run.config.service, model, asked, orchestrators)
    said = ", ".join(f"{pool} {size}" for pool, size in sizes.items())
    _change(name, lambda limit_s: Change(limit_s, sizes=sizes), f"scaling to {said}")


@app.command()
def redeploy(name: Name = DEFAULT_CLUSTER_NAME) -> None:
    """Replace every process of a running cluster by a new one, one after another."""
    _change(name, lambda limit_s: Change(limit_s, redeploy=True), "replacing every replica")


def _change(name: str, change: Callable[[float], Change], what: str) -> None:
    run, state = _running(name)
    terminal = Terminal(err)
    with terminal.failing():
        scaling.change(run, state, change(scaling.limit_s(run)), what, terminal)


@app.command()
def status(
    name: Name = DEFAULT_CLUSTER_NAME,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Pools, nodes, blocks, requests in flight, Redis, and what else listens."""
    found = state_of_cluster.gather(_folder(name))
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")
    else:
        state_of_cluster.show(found, out)


@app.command()
def chat(
    message: str,
    name: Name = DEFAULT_CLUSTER_NAME,
    url: Url = None,
    model: ServedOption = None,
    system: Annotated[str | None, typer.Option(help="A system message.", show_default="none")] = None,
    max_tokens: Annotated[int, typer.Option(help="The longest answer, in tokens.")] = 512,
    temperature: Annotated[float, typer.Option(help="0: always the same answer.")] = 0.0,
) -> None:
    """Ask one question; the answer is streamed."""
    pieces = conversation.answer(
        url or _url(name), message, model=model, system=system, max_tokens=max_tokens, temperature=temperature
    )
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


@app.command()
@flags.taken
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="For programs.", show_default="no")] = False, **given: Any
) -> None:
    """What is wrong with this host, with Redis and with the Ray cluster of --address, and what to do about each."""
    raise typer.Exit(0 if host_commands.doctor(as_json, given) else 1)


@app.command()
def sim(
    seeds: Annotated[int, typer.Option(help="How many simulations, one seed after another.")] = 100,
    seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    nodes: Annotated[
        int | None, typer.Option(help="Simulate load instead of faults, on so many nodes.", show_default="no load")
    ] = None,
    requests: Annotated[int, typer.Option(help="Of the load.")] = 100_000,
    trace: Annotated[
        str | None, typer.Option(help="Requests as JSON lines: timestamp, input_length, output_length, hash_ids.")
    ] = None,
) -> None:
    """The whole cluster in one thread on virtual time: seeded faults and what they break, or a load on many nodes."""
    if nodes is not None:
        load_report.run(nodes, requests, seed, trace, out)
        return
    tally = fault_report.simulate(range(seed, seed + seeds))
    fault_report.show(tally, out)
    raise typer.Exit(1 if tally.failed else 0)


@model_app.command("get")
def model_get(model: ModelOption = None) -> None:
    """Fetch, check and convert a model; prints its folder."""
    terminal = Terminal(err)
    terminal(Announcement("stage", f"getting {model or served_name(None)}"))
    folder = find(model, config.cache_dir(config.environment()), terminal)
    terminal(Announcement("ended"))
    sys.stdout.write(f"{folder}\n")


@verify_app.command("ledger")
def verify_ledger(
    name: Name = DEFAULT_CLUSTER_NAME,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    wait: Annotated[float, typer.Option(help="Seconds until requests that run count as work, not as a start.")] = 10.0,
) -> None:
    """Nobody holds anything for a request that has ended, and nodes, orchestrators and Redis agree on it."""
    report = audit.verify(_folder(name), wait)
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")
    else:
        audit.show(report, out)
    raise typer.Exit(0 if report.clean else 1)


@verify_app.command("parity")
def verify_parity(
    name: Annotated[
        str | None, typer.Option(help="A running cluster with one decode node.", show_default="one of its own")
    ] = None,
    model: ModelOption = None,
    data_parallel: Annotated[int, typer.Option(help="Replicas in each engine of a cluster of its own.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer prompts and tokens.")] = False,
    all_families: Annotated[
        bool,
        typer.Option("--all-families", help="Of every family of models, with random weights; no cluster is asked."),
    ] = False,
    features: Annotated[
        bool, typer.Option("--features", help="Each feature of generation, in place of greedy tokens and logits.")
    ] = False,
) -> None:
    """The cluster's tokens are one process's, and one process's logits are transformers'."""
    if all_families:
        raise typer.Exit(_run([], "cluster.verify_families"))
    checked = name or f"parity-{os.getpid()}"
    start = ["up", "--detach", "--name", checked, "--port=0", "--dashboard-port=0", f"--data-parallel={data_parallel}"]
    verify = [str(config.home(config.environment())), checked]
    try:
        if name is None and (code := _run([*start, *(["--model", model] if model else [])])) != 0:
            raise typer.Exit(code)
        chosen = [*(["--quick"] if quick else []), *(["--features"] if features else [])]
        code = _run([*verify, *chosen], "cluster.verify_parity")
    finally:
        if name is None:
            _run(["down", "--name", checked])
    raise typer.Exit(code)


def _run(arguments: list[str], module: str = "cluster.cli") -> int:
    """Another command of ours, in a process of its own: it carries a model, or becomes something else."""
    return subprocess.run([sys.executable, "-P", "-m", module, *arguments], check=False).returncode


def _folder(name: str) -> RunFolder:
    return RunFolder(config.home(config.environment()), name)


def _url(name: str) -> str:
    _, state = _running(name)
    assert state.url is not None
    return state.url


def _running(name: str) -> tuple[Run, RunState]:
    """Raises ConfigurationError where no cluster of that name is ready."""
    run, state = _folder(name).run(), _folder(name).state()
    if run is None or state is None or state.url is None:
        running = names(config.home(config.environment()))
        others = f"; there is {', '.join(running)}" if running else "; start one with `pronghorn up`"
        raise ConfigurationError(f"no cluster {name!r} is ready on this machine{others}")
    return run, state


def main() -> None:
    """The console script. Errors that a user can do something about are one line and exit code 1."""
    try:
        app()
    except PronghornError as error:
        Terminal(err)(Announcement("failed", error.message))
        sys.exit(1)


if __name__ == "__main__":
    main()
