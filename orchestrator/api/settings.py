"""What the HTTP surface is told at its start, of one model; what is not of a model is the same for all of them.

Frozen; whoever composes the application fills it in.
"""

import msgspec

MEBIBYTE = 1024 * 1024


class ApiSettings(msgspec.Struct, frozen=True, kw_only=True):
    model_name: str
    """Of which model these are; what `GET /v1/models` lists."""
    max_length: int
    """Prompt plus output, in tokens."""
    version: str
    created_unix_s: int
    """What `GET /v1/models` says under `created`."""

    default_deadline_s: float = 600.0
    """A request's whole time, from its first byte; a client may ask for less, never for more."""
    max_request_bytes: int = 100 * MEBIBYTE
    max_prompts: int = 64
    """Prompts in one `/v1/completions` body."""
    max_choices: int = 256
    """Choices of one request: its prompts times `n`."""
    logits_processors: frozenset[str] = frozenset()
    """Those that the engines have, by name."""
    max_preparing: int = 256
    """Requests that may be parsed and tokenised off the event loop or wait for it; one more is refused."""
    preparing_threads: int = 1
    offload_bytes: int = 4096
    """Longer bodies are parsed, templated and tokenised off the event loop."""
    heartbeat_s: float = 10.0
    """The longest silence on an open event stream before a comment is sent."""
    last_word_s: float = 2.0
    """How long a client that does not read may hold back the end of its stream once the request is over."""
    retry_after_s: float = 1.0
    tool_parser: str = "auto"
    """How the model writes tool calls (`pipelines/text/tool_format.py`); auto: by its chat template."""
    reasoning_parser: str = "auto"
    """How the model marks its thinking (`pipelines/text/reasoning_parser.py`); auto: by its chat template."""
    emit_reasoning_content: bool = False
    """Thinking is told as `reasoning_content` rather than `reasoning`."""
    structured_output: bool = True
    """Clients may send a response format. Calls of tools are enforced in any case."""
    use_client_cache_salt: bool = False
    """Honour `cache_salt` and `X-Cache-Salt`; only behind a gateway that is trusted to set them."""
    most_urgent_priority: int = -100
    """The lowest `priority` that a client may send."""
    share_header: str = "authorization"
    """By whose value clients are told apart, in lower case: each value has the same share of the service."""
    prefix_caching: bool = True
