"""The `pronghorn` command: flags in, one line per error out. What it does lives in the files that it names."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from cluster import chat as conversation
from cluster import config, scaling, signals
from cluster import drain as leaving
from cluster import status as state_of_cluster
from cluster import verify_ledger as audit
from cluster.announce import Announcement, Terminal
from cluster.config import DEFAULT_CLUSTER_NAME, DEFAULT_PORT, ClusterConfig
from cluster.driver import Change
from cluster.launch import prepare
from cluster.model import find, served_name
from cluster.run_folder import Run, RunFolder, RunState, names
from cluster.shutdown import take_down
from cluster.simulator import fault_report, load_report
from orchestrator.routing.policies import POLICIES
from pipelines.text.reasoning_parser import REASONING_FORMATS
from pipelines.text.tool_format import TOOL_FORMATS
from pronghorn.errors import ConfigurationError, PronghornError

ABOUT = "A prefill/decode serving cluster on this machine: start it, ask it, look at it, end it."

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=ABOUT)
model_app = typer.Typer(no_args_is_help=True, help="The model on this machine.")
verify_app = typer.Typer(
    no_args_is_help=True, help="Proof that a cluster computes what one process does, and keeps nothing."
)
app.add_typer(model_app, name="model")
app.add_typer(verify_app, name="verify")

out = Console(width=None if sys.stdout.isatty() else 160)
err = Console(stderr=True)

Name = Annotated[str, typer.Option(help="Which cluster of this machine.")]
ModelOption = Annotated[
    str | None,
    typer.Option(help="A Hugging Face folder, GGUF file or hub name.", show_default=f"{served_name(None)}, fetched"),
]
Url = Annotated[str | None, typer.Option(help="Where the cluster answers.", show_default="that of --name")]


@app.command()
def up(
    name: Name = DEFAULT_CLUSTER_NAME,
    model: ModelOption = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model.", show_default="the last part of --model")
    ] = None,
    prefill: Annotated[int, typer.Option(help="Prefill nodes; 0: decode nodes prefill for themselves.")] = 1,
    decode: Annotated[int, typer.Option(help="Decode nodes.")] = 1,
    orchestrators: Annotated[int, typer.Option(help="HTTP replicas.")] = 1,
    host: Annotated[str, typer.Option(help="Interface of the HTTP API.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the HTTP API; 0: any free one.")] = DEFAULT_PORT,
    dashboard_port: Annotated[
        int | None, typer.Option(help="Port of the Ray dashboard; 0: any free one.", show_default="8265, or a free one")
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option(envvar=config.REDIS_VARIABLE, help="A Redis to use.", show_default="a server of our own"),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="Join a Ray cluster (auto or host:port); needs --redis-url.", show_default="start one"),
    ] = None,
    edge: Annotated[str, typer.Option(help="What takes HTTP: auto, haproxy or serve (Serve's own proxy).")] = "auto",
    kv_memory: Annotated[str, typer.Option(help="Memory of each node's KV pool.")] = "512MiB",
    block_tokens: Annotated[int, typer.Option(help="Tokens in one KV block.")] = 16,
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16 or float16 storage.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, or cuda: one GPU per node.")] = "cpu",
    threads: Annotated[
        int | None, typer.Option(help="Threads of each engine.", show_default="every usable core")
    ] = None,
    chunk_tokens: Annotated[
        int | None, typer.Option(help="Tokens in one engine step.", show_default="512 on cpu, 2048 on cuda")
    ] = None,
    data_parallel: Annotated[
        int, typer.Option(help="Replicas of the model in each engine; they share its threads and KV memory.")
    ] = 1,
    max_batch_size: Annotated[int, typer.Option(help="Sequences in one engine step, for each replica.")] = 32,
    max_length: Annotated[
        int | None,
        typer.Option(help="Prompt plus output, in tokens.", show_default="the model's, where it fits"),
    ] = None,
    prefix_caching: Annotated[bool, typer.Option(help="Reuse the KV blocks of equal prefixes.")] = True,
    shared_memory: Annotated[bool, typer.Option(help="Let nodes on one host exchange blocks through memory.")] = True,
    tls_dir: Annotated[
        str | None,
        typer.Option(
            help="Folder of tls.crt, tls.key and ca.crt: mutual TLS between nodes and orchestrators.",
            show_default="plaintext",
        ),
    ] = None,
    policy: Annotated[str, typer.Option(help=f"How nodes are chosen: {', '.join(POLICIES)}.")] = "kv_aware",
    disaggregation: Annotated[
        str, typer.Option(help="auto: decode nodes may compute a prompt where that is clearly sooner; always: never.")
    ] = "auto",
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Further engine settings, as scheduling_strategy=balanced; repeatable.",
            show_default="none",
        ),
    ] = None,
    node_setting: Annotated[
        list[str] | None,
        typer.Option(
            "--node-set",
            metavar="NAME=VALUE",
            help="Further settings of nodes, as kv_connector=local or host_offload_bytes=1073741824; repeatable.",
            show_default="none",
        ),
    ] = None,
    kv_cache_hash_algo: Annotated[
        str, typer.Option(help="Names of blocks: sha256, sha256_64, or ahash64, which is faster and cannot be salted.")
    ] = "sha256",
    use_client_cache_salt: Annotated[
        bool,
        typer.Option(help="Honour cache_salt and X-Cache-Salt; only behind a gateway that is trusted to set them."),
    ] = False,
    advertise_host: Annotated[
        str | None,
        typer.Option(
            help="What nodes are dialled at, where something that forwards their ports stands before them.",
            show_default="their machine's address",
        ),
    ] = None,
    tool_parser: Annotated[
        str, typer.Option(help=f"How the model writes tool calls: auto, none, {', '.join(TOOL_FORMATS)}.")
    ] = "auto",
    reasoning_parser: Annotated[
        str, typer.Option(help=f"How the model marks its thinking: auto, none, {', '.join(REASONING_FORMATS)}.")
    ] = "auto",
    emit_reasoning_content: Annotated[
        bool, typer.Option(help="Tell thinking as reasoning_content rather than reasoning.")
    ] = False,
    structured_output: Annotated[bool, typer.Option(help="Let clients send a response format.")] = True,
    deadline: Annotated[float, typer.Option(help="Seconds that a request may take.")] = 600.0,
    drain_timeout: Annotated[float, typer.Option(help="Seconds for running requests when it ends.")] = 30.0,
    startup_timeout: Annotated[float, typer.Option(help="Seconds until a start counts as failed.")] = 300.0,
    detach: Annotated[
        bool,
        typer.Option("--detach", help="Return once ready; `pronghorn down` ends it.", show_default="stay with it"),
    ] = False,
) -> None:
    """Start a cluster on this machine. Ctrl-C drains and ends it; a second one does not wait."""
    wanted = config.parse(
        {
            "name": name,
            "host": host,
            "port": port,
            "dashboard_port": dashboard_port,
            "address": address,
            "edge": edge,
            "startup_timeout_s": startup_timeout,
            "service": {
                "model_path": "",
                "model_name": served_model_name or served_name(model),
                "redis_url": redis_url or "",
                "key_prefix": f"pronghorn:{name}",
                "prefill": prefill,
                "decode": decode,
                "orchestrators": orchestrators,
                "kv_memory_bytes": config.parse_bytes(kv_memory, "--kv-memory"),
                "block_tokens": block_tokens,
                "dtype": dtype,
                "device": device,
                "threads": threads or config.usable_cores(),
                "chunk_tokens": chunk_tokens,
                "data_parallel": data_parallel,
                "max_batch_size": max_batch_size,
                "max_length": max_length,
                "prefix_caching": prefix_caching,
                "tool_parser": tool_parser,
                "reasoning_parser": reasoning_parser,
                "emit_reasoning_content": emit_reasoning_content,
                "structured_output": structured_output,
                "shared_memory": shared_memory,
                "tls": None if tls_dir is None else config.tls_in(tls_dir),
                "policy": policy,
                "disaggregation": disaggregation,
                "engine_settings": dict(map(config.parse_setting, setting or [])),
                "node_settings": dict(map(config.parse_setting, node_setting or [])),
                "kv_cache_hash_algo": kv_cache_hash_algo,
                "use_client_cache_salt": use_client_cache_salt,
                "deadline_s": deadline,
                "drain_timeout_s": drain_timeout,
                "advertise_host": advertise_host,
            },
        },
        ClusterConfig,
    )
    signals.listen(signals.interrupt)
    terminal = Terminal(out)
    launch = prepare(wanted, model, terminal)
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
    prefill: Annotated[int | None, typer.Option(help="Prefill nodes.", show_default="as many as now")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode nodes.", show_default="as many as now")] = None,
    orchestrators: Annotated[int | None, typer.Option(help="HTTP replicas.", show_default="as many as now")] = None,
) -> None:
    """Change the size of a running cluster's pools. Nodes that go are drained first."""
    asked = {"prefill": prefill, "decode": decode, "orchestrator": orchestrators}
    sizes = {pool: size for pool, size in asked.items() if size is not None}
    if not sizes:
        raise ConfigurationError("say which pool: --prefill, --decode or --orchestrators")
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
    system: Annotated[str | None, typer.Option(help="A system message.", show_default="none")] = None,
    max_tokens: Annotated[int, typer.Option(help="The longest answer, in tokens.")] = 512,
    temperature: Annotated[float, typer.Option(help="0: always the same answer.")] = 0.0,
) -> None:
    """Ask one question; the answer is streamed."""
    pieces = conversation.answer(
        url or _url(name), message, system=system, max_tokens=max_tokens, temperature=temperature
    )
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


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
