"""Log probabilities of sampled tokens, as they cross processes."""

import msgspec


class LogProbabilities(msgspec.Struct, tag=True, omit_defaults=True):
    """Natural logarithms; the three lists have one entry a token: the sampled one, or with echo the prompt's too."""

    token_log_probabilities: list[float]
    top_log_probabilities: list[dict[int, float]]
    """The most likely tokens of each position, by id; the sampled one is always among them."""
    sampled_token_ids: list[int]
