"""How fast each node computes and each hand-over travels, learned while they do.

Pure: heartbeats and the timing of tokens come in. Averages that forget: a share `WEIGHT` of each new measure. A node
that has not been measured is taken to be as fast as the others on average, and with no others, as `Speeds` says.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from orchestrator.routing.break_even import Speeds
from pipelines.types.frames import NodeReport, TierReport
from pronghorn.ids import Incarnation

WEIGHT = 0.2
LEAST_TOKENS_PER_S = 1.0
LEAST_BYTES_PER_S = 1e4


@dataclass
class _Learned:
    prefill_tokens_per_s: float | None = None
    step_s: float | None = None
    link_bytes_per_s: float | None = None
    last_prompt_throughput: float = 0.0
    tier_bytes_per_s: dict[str, float] = field(default_factory=dict)
    """Of a node: as it said last, an average of its own."""


class LearnedSpeeds:
    def __init__(self) -> None:
        self._nodes: dict[Incarnation, _Learned] = {}
        self._all = _Learned()
        self._output_tokens: float | None = None

    def heartbeat(self, report: NodeReport) -> None:
        """A report repeats its last step's throughput until there is another one: each counts once."""
        learned = self._nodes.setdefault(report.incarnation, _Learned())
        rate = report.prompt_throughput
        if rate > LEAST_TOKENS_PER_S and rate != learned.last_prompt_throughput:
            learned.last_prompt_throughput = rate
            for one in (learned, self._all):
                one.prefill_tokens_per_s = _mixed(one.prefill_tokens_per_s, rate)
        if report.role == "decode" and report.running and report.generation_throughput > 0.0:
            step_s = report.running / report.generation_throughput
            for one in (learned, self._all):
                one.step_s = _mixed(one.step_s, min(step_s, 10.0))
        if not isinstance(report.tiers, msgspec.UnsetType):
            self._brought_back(learned, report.tiers)

    def _brought_back(self, learned: _Learned, tiers: Mapping[str, TierReport]) -> None:
        for tier, said in tiers.items():
            rate = said.bytes_per_s
            if rate is None or rate < LEAST_BYTES_PER_S or rate == learned.tier_bytes_per_s.get(tier):
                continue
            learned.tier_bytes_per_s[tier] = rate
            self._all.tier_bytes_per_s[tier] = _mixed(self._all.tier_bytes_per_s.get(tier), rate)

    def handed_over(self, decode: Incarnation, moved_bytes: float, compute_s: float, tail_s: float) -> None:
        """The second token came `tail_s` after the first, beyond a step: blocks were still on their way.

        The transfer ran beside the computing. Without a tail the link was not the bound, and is at least so fast.
        """
        learned = self._nodes.setdefault(decode, _Learned())
        rate = max(LEAST_BYTES_PER_S, moved_bytes / max(1e-4, compute_s + max(0.0, tail_s)))
        for one in (learned, self._all):
            before = one.link_bytes_per_s or Speeds().link_bytes_per_s
            if tail_s > 0.0 or rate > before:
                one.link_bytes_per_s = _mixed(before, rate)

    def ended(self, output_tokens: int) -> None:
        """A request came to its end, having said so much."""
        self._output_tokens = _mixed(self._output_tokens, float(output_tokens))

    def least_s(self, prompt_tokens: int, most_output_tokens: int) -> float:
        """How long a request takes on an idle node that is as fast as all are on average, if it says as much as others
        do. Nothing that has not been measured counts."""
        prompt_rate, step_s, said = self._all.prefill_tokens_per_s, self._all.step_s, self._output_tokens
        computing_s = 0.0 if prompt_rate is None else prompt_tokens / prompt_rate
        steps = 0.0 if said is None else min(said, most_output_tokens)
        return computing_s + (0.0 if step_s is None else step_s * steps)

    def forget(self, incarnation: Incarnation) -> None:
        self._nodes.pop(incarnation, None)

    def of(self, incarnation: Incarnation) -> Speeds:
        learned, everybody, default = self._nodes.get(incarnation, self._all), self._all, Speeds()
        speeds = Speeds(
            learned.prefill_tokens_per_s or everybody.prefill_tokens_per_s or default.prefill_tokens_per_s,
            learned.link_bytes_per_s or everybody.link_bytes_per_s or default.link_bytes_per_s,
            learned.step_s or everybody.step_s or default.step_s,
        )
        if not everybody.tier_bytes_per_s:
            return speeds
        tiers = everybody.tier_bytes_per_s | learned.tier_bytes_per_s
        return speeds._replace(
            host_bytes_per_s=tiers.get("host", default.host_bytes_per_s),
            disk_bytes_per_s=tiers.get("disk", default.disk_bytes_per_s),
        )


def _mixed(before: float | None, measure: float) -> float:
    return measure if before is None else before + WEIGHT * (measure - before)
