"""The flags that set something of the configuration: which, where in the tree, and their help.

`pronghorn up` and `pronghorn config` take the same ones. A flag that is not given sets nothing, and its default in the
help is the tree's own.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import typer

from cluster import config
from cluster.config import ClusterConfig, ServiceConfig
from cluster.config_sources import Place, Value, written
from cluster.model import DEFAULT_NAME, named_spec, served_name
from orchestrator.routing.policies import POLICIES
from pipelines.text.reasoning_parser import REASONING_FORMATS
from pipelines.text.tool_format import TOOL_FORMATS
from pronghorn.errors import ConfigurationError

Command = TypeVar("Command", bound=Callable[..., Any])


class Flag(NamedTuple):
    name: str
    path: str
    kind: Any
    help: str
    default: str | None = None
    """As the help shows it; None: the tree's."""


FLAGS = (
    Flag("name", "name", str, "Which cluster of this machine."),
    Flag(
        "model",
        "model",
        list[str],
        "A Hugging Face folder, GGUF file or hub name; of several models each as NAME=PATH.",
        f"{DEFAULT_NAME}, fetched",
    ),
    Flag("served-model-name", "service.model_name", str, "What clients call the model.", "the last part of --model"),
    Flag("prefill", "service.prefill", int, "Prefill nodes; 0: decode nodes prefill for themselves."),
    Flag("decode", "service.decode", int, "Decode nodes."),
    Flag("orchestrators", "service.orchestrators", int, "HTTP replicas."),
    Flag("host", "host", str, "Interface of the HTTP API."),
    Flag("port", "port", int, "Port of the HTTP API; 0: any free one."),
    Flag("dashboard-port", "dashboard_port", int, "Port of the Ray dashboard; 0: any free one.", "8265, or a free one"),
    Flag("redis-url", "service.redis_url", str, "A Redis to use.", "REDIS_URL, or a server of our own"),
    Flag("address", "address", str, "Join a Ray cluster (auto or host:port); needs --redis-url.", "start one"),
    Flag("scheduling", "scheduling", str, "On a Ray cluster that is joined: spread over its machines, or pack."),
    Flag("edge", "edge", str, "What takes HTTP: auto, haproxy or serve (Serve's own proxy)."),
    Flag("kv-memory", "service.kv_memory_bytes", str, "Memory of each node's KV pool."),
    Flag("block-tokens", "service.block_tokens", int, "Tokens in one KV block."),
    Flag("dtype", "service.dtype", str, "float32, or bfloat16 or float16 storage."),
    Flag("device", "service.device", str, "cpu, or cuda: one GPU per node."),
    Flag("threads", "service.threads", int, "Threads of each engine.", "every usable core"),
    Flag("chunk-tokens", "service.chunk_tokens", int, "Tokens in one engine step.", "512 on cpu, 2048 on cuda"),
    Flag(
        "data-parallel",
        "service.data_parallel",
        int,
        "Replicas of the model in each engine; they share its threads and KV memory.",
    ),
    Flag("max-batch-size", "service.max_batch_size", int, "Sequences in one engine step, for each replica."),
    Flag("max-length", "service.max_length", int, "Prompt plus output, in tokens.", "the model's, where it fits"),
    Flag("prefix-caching", "service.prefix_caching", bool, "Reuse the KV blocks of equal prefixes."),
    Flag("policy", "service.policy", str, f"How nodes are chosen: {', '.join(POLICIES)}."),
    Flag(
        "disaggregation",
        "service.disaggregation",
        str,
        "auto: decode nodes may compute a prompt where that is clearly sooner; always: never.",
    ),
    Flag(
        "kv-cache-hash-algo",
        "service.kv_cache_hash_algo",
        str,
        "Names of blocks: sha256, sha256_64, or ahash64, which is faster and cannot be salted.",
    ),
    Flag(
        "use-client-cache-salt",
        "service.use_client_cache_salt",
        bool,
        "Honour cache_salt and X-Cache-Salt; only behind a gateway that is trusted to set them.",
    ),
    Flag(
        "advertise-host",
        "service.advertise_host",
        str,
        "What nodes are dialled at, where something that forwards their ports stands before them.",
        "their machine's address",
    ),
    Flag(
        "tool-parser",
        "service.tool_parser",
        str,
        f"How the model writes tool calls: auto, none, {', '.join(TOOL_FORMATS)}.",
    ),
    Flag(
        "reasoning-parser",
        "service.reasoning_parser",
        str,
        f"How the model marks its thinking: auto, none, {', '.join(REASONING_FORMATS)}.",
    ),
    Flag(
        "emit-reasoning-content",
        "service.emit_reasoning_content",
        bool,
        "Tell thinking as reasoning_content rather than reasoning.",
    ),
    Flag("shared-memory", "service.shared_memory", bool, "Let nodes on one host exchange blocks through memory."),
    Flag(
        "tls-dir",
        "service.tls",
        str,
        "Folder of tls.crt, tls.key and ca.crt: mutual TLS between nodes and orchestrators.",
        "plaintext",
    ),
    Flag("structured-output", "service.structured_output", bool, "Let clients send a response format."),
    Flag("deadline", "service.deadline_s", float, "Seconds that a request may take."),
    Flag("drain-timeout", "service.drain_timeout_s", float, "Seconds for running requests when it ends."),
    Flag("startup-timeout", "startup_timeout_s", float, "Seconds until a start counts as failed."),
)

CONFIG = ("--config", "FILE", "Settings as YAML or TOML (docs/configuration.md); flags win.", "PRONGHORN_CONFIG")
SEVERAL = {
    "--set": ("NAME=VALUE", "Further engine settings, as scheduling_strategy=balanced; repeatable.", "engine_settings"),
    "--node-set": (
        "NAME=VALUE",
        "Further settings of nodes, as kv_connector=local or host_offload_bytes=1073741824; repeatable.",
        "node_settings",
    ),
    "--option": ("PATH=VALUE", "Anything of the configuration, as service.max_in_flight=64; repeatable.", None),
}


def taken(command: Command) -> Command:
    """`command`, whose parameter `given` becomes these flags; its other parameters stay."""
    signature = inspect.signature(command, eval_str=True)
    own = [parameter for name, parameter in signature.parameters.items() if name != "given"]
    parameters = [*map(_parameter, FLAGS), *_several(), *own]
    keyword_only = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    command.__signature__ = signature.replace(parameters=keyword_only)  # type: ignore[attr-defined]  # inspect reads it
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in keyword_only}
    return command


def _parameter(flag: Flag) -> inspect.Parameter:
    option = typer.Option(help=flag.help, show_default=flag.default or _default(flag))
    return _optional(flag.name.replace("-", "_"), Annotated[flag.kind | None, option])


def _several() -> Iterator[inspect.Parameter]:
    name, metavar, text, default = CONFIG
    yield _optional(
        "config_file", Annotated[str | None, typer.Option(name, metavar=metavar, help=text, show_default=default)]
    )
    for name, (metavar, text, _) in SEVERAL.items():
        option = typer.Option(name, metavar=metavar, help=text, show_default="none")
        yield _optional(name.strip("-").replace("-", "_"), Annotated[list[str] | None, option])


def _optional(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _default(flag: Flag) -> str:
    kind: type[msgspec.Struct] = ServiceConfig if flag.path.startswith("service.") else ClusterConfig
    name = flag.path.rpartition(".")[2]
    value = next(field.default for field in msgspec.structs.fields(kind) if field.name == name)
    if name.endswith("_bytes"):
        return f"{value // config.MEBIBYTE}MiB"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def values(given: Mapping[str, Any]) -> dict[Place, Value]:
    """What the flags on the command line say. Raises ConfigurationError naming the flag."""
    found: dict[Place, Value] = {}
    for flag in FLAGS:
        value = given.get(flag.name.replace("-", "_"))
        if flag.name == "model":
            found |= _models(value or [])
        elif value is not None:
            found |= _set(tuple(flag.path.split(".")), value, f"--{flag.name}")
    for option, (_, _, below) in SEVERAL.items():
        for text in given.get(option.strip("-").replace("-", "_")) or []:
            if below is None:
                found |= dict([written(text)])
            else:
                name, value = config.parse_setting(text)
                found["service", below, name] = Value(value, option)
    return found


def _models(specs: list[str]) -> dict[Place, Value]:
    """One without a name of its own is the cluster's `model`; any others stand in `service.models`."""
    named = [named_spec(spec) for spec in specs]
    if len(named) == 1 and named[0][0] is None:
        return {("model",): Value(specs[0], "--model")}
    found: dict[Place, Value] = {}
    for name, path in named:
        place = ("service", "models", name or served_name(path), "path")
        if place in found:
            raise ConfigurationError(
                f"--model names {place[2]!r} twice, for {found[place].value} and for {path}; write NAME=PATH",
                param="model",
            )
        found[place] = Value(path, "--model")
    return found


def _set(place: Place, value: Any, option: str) -> dict[Place, Value]:
    if place == ("service", "tls"):
        return {(*place, name): Value(path, option) for name, path in config.tls_in(value).items()}
    if place[-1].endswith("_bytes"):
        return {place: Value(config.parse_bytes(value, option), option)}
    return {place: Value(value, option)}
