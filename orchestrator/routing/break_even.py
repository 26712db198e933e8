"""How long a prompt takes until its answer flows: computed where it is decoded, or on a prefill node and handed over.

Pure arithmetic on measured speeds; it knows no node. The same model decides for a request (`policies.KvAware`) and
makes the table of docs/break-even.md. All times are predictions, good for comparing two ways, not for promising.

    here:   wait + compute,           and each running stream stands still for as long as the prompt is computed
    apart:  wait + compute + hops,    then what is left of the transfer, which runs beside the computing

What a node brings back from tiers of its own it brings while others' prompts are computed before this one: the wait is
the longer of both. What cannot be seen yet, streams that will come, speaks for apart: here must win by a margin.
"""

from typing import NamedTuple

HOP_S = 0.001
"""Orchestrator to node, or node to node: a message each way."""
STREAM_SHARE = 0.05
"""What a second of a running stream's standing still weighs, beside a second of waiting for a first token."""
RESTORE_S = 0.005
"""To bring anything back at all: blocks are asked of the engine, between two steps, and given to it again."""
MARGIN_S = 0.02
MARGIN_SHARE = 0.1
"""Here is chosen where it saves more than both, the second a share of the time apart."""


class Speeds(NamedTuple):
    """Of one node, learned while it runs (`speeds.py`)."""

    prefill_tokens_per_s: float = 2000.0
    link_bytes_per_s: float = 1e9
    step_s: float = 0.02
    """One decode step of a small batch."""
    stream_s: float = 0.0005
    """What one more stream adds to a step."""
    host_bytes_per_s: float = 2e9
    """At which blocks come back from the node's memory, with their digests."""
    disk_bytes_per_s: float = 5e8


class Task(NamedTuple):
    """A prompt's share for one node."""

    wait_s: float
    compute_s: float


def task(new_tokens: int, queued_tokens: int, speeds: Speeds, restore_s: float = 0.0) -> Task:
    """So many tokens are to be computed, after those that wait, and once what tiers have is back."""
    rate = speeds.prefill_tokens_per_s
    wait_s = queued_tokens / rate
    return Task(wait_s if wait_s > restore_s else restore_s, new_tokens / rate)


def restore_s(host_bytes: float, disk_bytes: float, speeds: Speeds) -> float:
    """Until so much is back from a node's own tiers."""
    if not (host_bytes or disk_bytes):
        return 0.0
    return RESTORE_S + host_bytes / speeds.host_bytes_per_s + disk_bytes / speeds.disk_bytes_per_s


def restored_worth(bytes_per_token: float, bytes_per_s: float, speeds: Speeds) -> float:
    """What a token that is brought back is worth, beside one that lies in the pool: the share of its computing that is
    saved; 0 where computing is faster."""
    return max(0.0, 1.0 - speeds.prefill_tokens_per_s * bytes_per_token / bytes_per_s)


def here_s(task: Task, running: int) -> float:
    """Computed on the decode node, with the harm to the streams that run there."""
    return task.wait_s + task.compute_s * (1.0 + STREAM_SHARE * running)


def apart_s(task: Task, transfer_s: float) -> float:
    """Computed on a prefill node and handed over to the decode node, for what that lacks."""
    left_s = transfer_s - task.compute_s
    return task.wait_s + task.compute_s + 2 * HOP_S + (left_s if left_s > 0.0 else 0.0)


def transfer_s(moved_bytes: float, link_bytes_per_s: float) -> float:
    return moved_bytes / link_bytes_per_s


def here_wins(here: float, apart: float) -> bool:
    return here + MARGIN_S + MARGIN_SHARE * apart < apart
