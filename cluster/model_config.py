"""One of several models of a cluster: where it is, and what it has otherwise than the others.

Knows which settings a model may have of its own, how they come over the shared ones, and what its pools are called.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from cluster.config_problems import Problem, wrong
from cluster.setting_types import Count, CountOrNone, Device, Disaggregation, Dtype, Placement

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,63}")


class ModelPlacement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    prefill: Placement | None = None
    decode: Placement | None = None


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """All but `path` means what it does in `ServiceConfig`; None: as there."""

    path: str
    """A Hugging Face folder, GGUF file or hub name; in the arguments of the Serve application a folder that every host
    can read."""
    prefill: CountOrNone | None = None
    decode: Count | None = None
    kv_memory_bytes: Count | None = None
    block_tokens: Count | None = None
    dtype: Dtype | None = None
    device: Device | None = None
    threads: Count | None = None
    data_parallel: Count | None = None
    chunk_tokens: Count | None = None
    max_batch_size: Count | None = None
    max_in_flight: Count | None = None
    max_length: Count | None = None
    prefix_caching: bool | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    emit_reasoning_content: bool | None = None
    structured_output: bool | None = None
    policy: str | None = None
    disaggregation: Disaggregation | None = None
    node_settings: dict[str, Any] = {}
    """Beside the shared ones, and before them."""
    engine_settings: dict[str, Any] = {}
    """Likewise."""
    placement: ModelPlacement = ModelPlacement()

    def over(self, shared: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of a `ServiceConfig` with this model's in their places; the model's name and path aside."""
        own = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        del own["path"]
        for name in ("node_settings", "engine_settings"):
            own[name] = {**shared[name], **own[name]}
        placed = {role: place for role, place in msgspec.structs.asdict(self.placement).items() if place is not None}
        own["placement"] = msgspec.structs.replace(shared["placement"], **placed)
        return {**shared, **own}


def pool(role: str, model: str | None) -> str:
    """What Serve calls the deployment of that model's nodes of that role; None: of the only model, which has no name
    in `models`. What Serve and files could not take in a name becomes a dash."""
    return role if model is None else f"{role}-{re.sub(r'[^a-z0-9]+', '-', model.lower())}"


def problems_of_names(models: Mapping[str, ModelConfig]) -> Iterator[Problem]:
    pools: dict[str, str] = {}
    for name, own in models.items():
        if not NAME.fullmatch(name):
            bound = "1 to 64 letters, digits and ._/-, the first a letter or digit"
            yield Problem(f"models.{name}", f"models has {name!r}; a model's name must be {bound}")
        if (other := pools.setdefault(pool("decode", name), name)) != name:
            text = f"models has {other!r} and {name!r}, whose pools would both be called {pool('decode', name)!r}"
            yield Problem(f"models.{name}", text)
        if not own.path:
            yield wrong(f"models.{name}.path", own.path, "a Hugging Face folder, GGUF file or hub name")
