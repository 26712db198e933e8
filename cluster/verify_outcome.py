"""What one request came to, token by token and choice by choice, and how two outcomes are compared. Pure."""

from dataclasses import dataclass, field

from cluster.verify_cases import judge
from pipelines.types.frames import Delta
from pipelines.types.log_probabilities import LogProbabilities
from pipelines.types.status import GenerationStatus
from pipelines.types.text_output import TextGenerationOutput

LOGPROB_TOLERANCE = 1e-4


@dataclass
class Choice:
    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[LogProbabilities] = field(default_factory=list)
    status: GenerationStatus = GenerationStatus.ACTIVE

    @property
    def gaps(self) -> list[float]:
        """Per token, how far apart the two best logits lay; infinite where no second is known."""
        return [_gap(entry) for entry in self.log_probabilities] or [float("inf")] * len(self.tokens)


@dataclass
class Outcome:
    choices: list[Choice]
    prompt: LogProbabilities | None = None
    cached_tokens: int = 0

    def take(self, output: TextGenerationOutput) -> None:
        choice = self.choices[output.choice]
        choice.tokens += output.tokens
        choice.log_probabilities += output.log_probabilities or []
        choice.status = output.final_status
        self.prompt = output.prompt_log_probabilities or self.prompt
        self.cached_tokens = max(self.cached_tokens, output.num_cached_tokens or 0)

    def take_delta(self, delta: Delta) -> None:
        self.take(
            TextGenerationOutput(
                request_id=delta.fence.request_id,
                tokens=delta.tokens,
                final_status=delta.choice_status or delta.status,
                log_probabilities=delta.log_probabilities,
                num_cached_tokens=delta.num_cached_tokens,
                choice=delta.choice,
                prompt_log_probabilities=delta.prompt_log_probabilities,
            )
        )

    @property
    def is_done(self) -> bool:
        return all(choice.status.is_done for choice in self.choices)


def new_outcome(num_choices: int) -> Outcome:
    return Outcome([Choice() for _ in range(num_choices)])


def difference(expected: Outcome, found: Outcome) -> str | None:
    """The first thing in which `found` is not what was expected; None where they are equal. Greedy tokens may part at a
    near tie; log probabilities are equal within `LOGPROB_TOLERANCE`."""
    for index, (ours, theirs) in enumerate(zip(expected.choices, found.choices, strict=True)):
        verdict, at = judge(ours.tokens, theirs.tokens, ours.gaps)
        if verdict == "near tie":
            continue
        if verdict == "different":
            return f"choice {index}, token {at}: {theirs.tokens}, expected {ours.tokens}"
        if ours.status is not theirs.status:
            return f"choice {index} ended as {theirs.status}, expected {ours.status}"
        if said := _unlike(ours.log_probabilities, theirs.log_probabilities):
            return f"choice {index}: {said}"
    ours_of_prompt = [] if expected.prompt is None else [expected.prompt]
    if said := _unlike(ours_of_prompt, [] if found.prompt is None else [found.prompt]):
        return f"the prompt: {said}"
    return None


def _unlike(expected: list[LogProbabilities], found: list[LogProbabilities]) -> str | None:
    ours = [value for entry in expected for value in entry.token_log_probabilities]
    theirs = [value for entry in found for value in entry.token_log_probabilities]
    if len(ours) != len(theirs):
        return f"{len(theirs)} log probabilities, expected {len(ours)}"
    ours_top = [sorted(top.values()) for entry in expected for top in entry.top_log_probabilities]
    theirs_top = [sorted(top.values()) for entry in found for top in entry.top_log_probabilities]
    for at, (a, b) in enumerate(zip([[v] for v in ours] + ours_top, [[v] for v in theirs] + theirs_top, strict=True)):
        if len(a) != len(b) or any(not _close(x, y) for x, y in zip(a, b, strict=True)):
            return f"log probability {at % len(ours)} is {b}, expected {a}"
    return None


def _close(a: float, b: float) -> bool:
    return a == b or abs(a - b) <= LOGPROB_TOLERANCE


def _gap(entry: LogProbabilities) -> float:
    best = sorted(entry.top_log_probabilities[0].values(), reverse=True)
    return best[0] - best[1] if len(best) > 1 else float("inf")
