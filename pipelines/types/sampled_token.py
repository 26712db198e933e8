"""One token as it was sampled, on its way between processes."""

import msgspec

from pipelines.types.log_probabilities import LogProbabilities


class SampledToken(msgspec.Struct, frozen=True, omit_defaults=True):
    token: int
    log_probabilities: LogProbabilities | None = None
