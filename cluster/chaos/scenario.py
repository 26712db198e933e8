"""A scenario as data: the load, what is done to the cluster and when, and what must hold. Read whole from YAML, and
refused whole: every problem with its path, its value and its bound. Does nothing.

A fault names a process or a pool, never one by name: who is struck is chosen when it strikes. Kinds of faults are the
classes below; their `kind` is the name in `KINDS`.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta, Struct

from cluster.config_problems import Problem, Refused, checked, nearest, wrong
from pronghorn.errors import ConfigurationError

Count = Annotated[int, Meta(ge=1, le=100_000)]
Some = Annotated[int, Meta(ge=0, le=100_000_000)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Seconds = Annotated[float, Meta(gt=0.0, le=86_400.0)]
Lengths = Annotated[list[Annotated[int, Meta(ge=1, le=100_000)]], Meta(min_length=1)]

Pool = Literal["prefill", "decode"]
Victim = Literal["prefill", "decode", "orchestrator", "prefill-engine", "decode-engine", "edge"]
"""The edge is what takes HTTP before the orchestrators."""
Ways = Literal["both", "up", "down"]
"""Of a link: up is from those who dial to the node."""


class Cluster(Struct, frozen=True):
    """What the scenario needs at least."""

    prefill: Count = 1
    decode: Count = 1
    orchestrators: Count = 1
    machines: Annotated[int, Meta(ge=1, le=16)] = 1
    """Of Ray. Where there are several, orchestrators run on the head and nodes elsewhere, one of a pool on each."""
    disks: Annotated[int, Meta(ge=0, le=1)] = 0
    """On which nodes keep blocks that their pool gives up."""


class Load(Struct, frozen=True):
    """Streams at once, each asking one thing after another, until the faults are over and the cluster is whole."""

    streams: Annotated[int, Meta(ge=1, le=1024)] = 16
    requests: Count = 32
    """At least."""
    prompts: Count = 16
    """Different ones; every one is asked once before anything is done, and its text is what must come again."""
    prompt_words: Lengths = msgspec.field(default_factory=lambda: [30])
    new_tokens: Lengths = msgspec.field(default_factory=lambda: [48])
    seeded: Share = 0.5
    """Of the prompts: drawn with a seed; the others are greedy."""
    leaving: Share = 0.0
    """Of the requests: their client leaves at any moment."""
    deadline_s: Seconds = 120.0
    retries: Annotated[int, Meta(ge=0, le=100)] = 3
    """How often a client asks again whose connection broke, or who was told 429 or 503."""


class When(Struct, frozen=True):
    """Exactly one of them, counted from the beginning of the load."""

    s: Annotated[float, Meta(ge=0.0, le=86_400.0)] | None = None
    pieces: Some | None = None
    """Pieces of text that its clients have had."""
    ended: Some | None = None
    """Requests that have ended."""
    link_bytes: Some | None = None
    """Bytes that have passed on the link of one of its pool, on the way of `link_way`: that one is the victim."""
    link_way: Literal["up", "down"] = "down"

    @property
    def given(self) -> list[str]:
        return [name for name in ("s", "pieces", "ended", "link_bytes") if getattr(self, name) is not None]


class _Fault(Struct, frozen=True, kw_only=True):
    at: When


class Kill(_Fault, frozen=True):
    """SIGKILL."""

    process: Victim
    count: Count = 1


class Stop(_Fault, frozen=True):
    """SIGSTOP, and SIGCONT later."""

    process: Victim
    for_s: Seconds
    count: Count = 1


class Cut(_Fault, frozen=True):
    """Nothing passes on the link of a node, and nothing is lost."""

    node: Pool
    for_s: Seconds
    ways: Ways = "both"


class BlackHole(_Fault, frozen=True):
    """What is sent on the link of a node is thrown away."""

    node: Pool
    for_s: Seconds
    ways: Ways = "both"


class Reset(_Fault, frozen=True):
    """Every connection to a node ends with an RST."""

    node: Pool


class Delay(_Fault, frozen=True):
    node: Pool
    for_s: Seconds
    by_s: Seconds
    ways: Ways = "both"


class Slow(_Fault, frozen=True):
    node: Pool
    for_s: Seconds
    bytes_per_s: Annotated[float, Meta(ge=1.0)]
    ways: Ways = "both"


class Flip(_Fault, frozen=True):
    """One byte on the link of a node, `offset` bytes on, has its bits turned over."""

    node: Pool
    offset: Some = 0
    ways: Literal["up", "down"] = "down"


class Drain(_Fault, frozen=True):
    """A node is asked to leave, as `pronghorn drain` does."""

    node: Pool
    grace_s: Annotated[float, Meta(ge=0.0, le=86_400.0)] = 10.0


class Redeploy(_Fault, frozen=True):
    """Every process is replaced by a new one, one after another, as by `pronghorn redeploy`."""


class Scale(_Fault, frozen=True):
    """A pool is made another size, as by `pronghorn scale`, and then as large as it was."""

    node: Literal["prefill", "decode", "orchestrator"]
    to: Annotated[int, Meta(ge=1, le=64)]


class LeaveStorm(_Fault, frozen=True):
    """Requests whose clients leave within so many seconds, some before they have sent all."""

    requests: Count
    within_s: Seconds = 0.5


class Overload(_Fault, frozen=True):
    """So many times the load's streams on top of it. Each must be answered, or told why not."""

    times: Annotated[float, Meta(gt=0.0, le=100.0)]
    for_s: Seconds


class Garbage(_Fault, frozen=True):
    """Requests that are wrong. Each must be refused as the client's fault."""

    requests: Count


class ForgetPrefixes(_Fault, frozen=True):
    """Every cached prefix is dropped."""


class RedisKill(_Fault, frozen=True):
    """SIGKILL; the cluster's supervisor starts it again."""


class RedisPause(_Fault, frozen=True):
    """SIGSTOP, and SIGCONT later."""

    for_s: Seconds


class RedisFlush(_Fault, frozen=True):
    """FLUSHALL."""


class RayletKill(_Fault, frozen=True):
    """The machine of a node is lost: SIGKILL to its raylet, with which everything ends that Ray started there. Another
    machine joins later."""

    node: Pool
    another_after_s: Seconds = 5.0


class OutOfMemory(_Fault, frozen=True):
    """It may have no more memory, and the kernel kills it when it asks for more."""

    process: Victim
    count: Count = 1


class LosePackets(_Fault, frozen=True):
    """Of all packets on the cluster's network, whoever's they are, the kernel drops so many in a hundred."""

    percent: Annotated[float, Meta(gt=0.0, le=50.0)]
    for_s: Seconds


class FillDisk(_Fault, frozen=True):
    """Nothing more can be written to the disk on which nodes keep blocks."""

    for_s: Seconds


class GcsKill(_Fault, frozen=True):
    """SIGKILL to Ray's GCS, which is started again later, with the state that it had."""

    for_s: Seconds


Fault = (
    Kill | Stop | Cut | BlackHole | Reset | Delay | Slow | Flip | Drain | Redeploy | Scale | LeaveStorm | Overload
    | Garbage | ForgetPrefixes | RedisKill | RedisPause | RedisFlush | RayletKill | GcsKill
    | OutOfMemory | LosePackets | FillDisk
)  # fmt: skip
LinkFault = Cut | BlackHole | Reset | Delay | Slow | Flip
RayFault = RayletKill | GcsKill
NamespaceFault = LosePackets | FillDisk
SignalFault = Kill | Stop | OutOfMemory | RedisKill | RedisPause | RayletKill | GcsKill
CommandFault = Redeploy | Scale

KINDS: dict[str, type[Fault]] = {
    "kill": Kill, "stop": Stop, "cut": Cut, "black-hole": BlackHole, "reset": Reset, "delay": Delay, "slow": Slow,
    "flip": Flip, "drain": Drain, "redeploy": Redeploy, "scale": Scale,
    "leave-storm": LeaveStorm, "overload": Overload, "garbage": Garbage, "forget-prefixes": ForgetPrefixes,
    "redis-kill": RedisKill, "redis-pause": RedisPause, "redis-flush": RedisFlush,
    "raylet-kill": RayletKill, "gcs-kill": GcsKill, "out-of-memory": OutOfMemory, "lose-packets": LosePackets,
    "fill-disk": FillDisk,
}  # fmt: skip
_NAMES = {kind: name for name, kind in KINDS.items()}


def kind_of(fault: Fault) -> str:
    return _NAMES[type(fault)]


def aim_of(fault: Fault) -> str:
    """What it is aimed at, for people."""
    return str(getattr(fault, "process", None) or getattr(fault, "node", ""))


NEEDS = {
    "another clock": "one machine has one clock",
    "Kubernetes": "there is none here",
}
"""What a scenario may need that no cluster has which this harness knows, and why."""
Need = Literal["another clock", "Kubernetes"]


class Checks(Struct, frozen=True):
    """Beside those that always hold: every fault fired, and nothing is lost, duplicated, wrong or left over."""

    errors: Some | None = 0
    """Requests of the load that may end in an error that says why; null: any number."""
    recovered_within_s: Seconds = 120.0
    """From the end of the last fault until every pool is as it was, and ready."""
    longest_gap_s: Seconds | None = None
    """Between two pieces of any stream; null: any."""


class Scenario(Struct, frozen=True):
    name: str
    about: str
    faults: list[Fault]
    cluster: Cluster = Cluster()
    load: Load = Load()
    checks: Checks = Checks()
    limit_s: Seconds = 300.0
    """For the load and the faults, recovery not counted."""
    needs: list[Need] = []


class _Head(Struct, frozen=True):
    """A scenario without what has a kind."""

    name: str
    about: str
    cluster: Cluster = Cluster()
    load: Load = Load()
    checks: Checks = Checks()
    limit_s: Seconds = 300.0
    needs: list[Need] = []


def read(text: str, name: str) -> Scenario:
    """`name`: what it is called where it does not say so itself. Raises ConfigurationError with every problem."""
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{name} is no YAML: {error}") from None
    if not isinstance(raw, Mapping):
        raise ConfigurationError(f"{name} is no scenario: it must be a mapping of {', '.join(_Head.__struct_fields__)}")
    problems: list[Problem] = []
    head, faults = None, []
    try:
        head = checked({"name": name, **{key: value for key, value in raw.items() if key != "faults"}}, _Head)
    except Refused as refused:
        problems += refused.problems
    listed = raw.get("faults")
    if not isinstance(listed, list):
        problems.append(wrong("faults", listed, "a list of faults, which may be empty"))
        listed = []
    for number, item in enumerate(listed):
        try:
            faults.append(_fault(item, f"faults[{number}]"))
        except Refused as refused:
            problems += refused.problems
    if problems or head is None:
        raise _all(name, problems)
    scenario = Scenario(faults=faults, **{field: getattr(head, field) for field in _Head.__struct_fields__})
    if found := list(_together(scenario)):
        raise _all(name, found)
    return scenario


def _all(name: str, problems: list[Problem]) -> Refused:
    return Refused([Problem(problem.path, f"{name}: {problem.text}") for problem in problems])


def _fault(item: Any, place: str) -> Fault:
    if not isinstance(item, Mapping) or "kind" not in item:
        raise Refused([wrong(place, item, "a mapping with a kind")])
    kind = KINDS.get(item["kind"]) if isinstance(item["kind"], str) else None
    if kind is None:
        hint = nearest(str(item["kind"]), KINDS)
        raise Refused([wrong(f"{place}.kind", item["kind"], f"one of {', '.join(KINDS)}{hint}")])
    try:
        return checked({key: value for key, value in item.items() if key != "kind"}, kind)
    except Refused as refused:
        raise Refused([Problem(f"{place}.{p.path}", f"{place}.{p.text}") for p in refused.problems]) from None


def _together(scenario: Scenario) -> Iterator[Problem]:
    """Of values that are right by themselves."""
    machines = scenario.cluster.machines
    for pool in ("prefill", "decode") if machines > 1 else ():
        if (nodes := getattr(scenario.cluster, pool)) > machines - 1:
            yield wrong(f"cluster.{pool}", nodes, f"at most {machines - 1}: cluster.machines without the head")
    for number, fault in enumerate(scenario.faults):
        place = f"faults[{number}]"
        if len(fault.at.given) != 1:
            yield wrong(f"{place}.at", fault.at.given, "exactly one of s, pieces, ended, link_bytes")
        if fault.at.link_bytes is not None and aim_node(fault) is None:
            yield wrong(f"{place}.at.link_bytes", fault.at.link_bytes, "absent: the fault is aimed at no node")
        if isinstance(fault, FillDisk) and scenario.cluster.disks == 0:
            yield wrong("cluster.disks", 0, f"1 for {kind_of(fault)}")
        if isinstance(fault, RayFault) and machines == 1:
            yield wrong("cluster.machines", machines, f"at least 2 for {kind_of(fault)}")
        if isinstance(fault, Kill | Stop | OutOfMemory):
            pool = "orchestrators" if fault.process == "orchestrator" else fault.process.removesuffix("-engine")
            there = 1 if pool == "edge" else getattr(scenario.cluster, pool)
            if fault.count > there:
                which = "as many as there are" if pool == "edge" else f"which is cluster.{pool}"
                yield wrong(f"{place}.count", fault.count, f"at most {there}, {which}")


def aim_node(fault: Fault) -> str | None:
    """The pool of the node on whose link `at.link_bytes` are counted; None where it is aimed at none."""
    if isinstance(fault, LinkFault | Drain):
        return fault.node
    if isinstance(fault, Kill | Stop | OutOfMemory) and fault.process not in ("orchestrator", "edge"):
        return fault.process.removesuffix("-engine")
    return None
