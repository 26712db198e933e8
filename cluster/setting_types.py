"""The words of settings: which values they take, and where a pool may be. No setting stands here."""

from typing import Annotated, Literal

import msgspec

Dtype = Literal["float32", "bfloat16", "float16"]
Device = Literal["cpu", "cuda"]
Disaggregation = Literal["auto", "always"]
Edge = Literal["auto", "haproxy", "serve"]
Scheduling = Literal["spread", "pack"]
ProxyLocation = Literal["EveryNode", "HeadOnly"]

Count = Annotated[int, msgspec.Meta(ge=1)]
CountOrNone = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Priority = Annotated[int, msgspec.Meta(ge=-100, le=100)]
HeaderName = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9-]+$")]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """On which machines of a Ray cluster a pool may be; {} of everything: on any."""

    labels: dict[str, str] = {}
    """What a machine's labels must be, as in Ray's label selectors: a value, "!value", "in(a, b)" or "!in(a, b)"."""
    resources: dict[str, Positive] = {}
    """What each replica takes of a machine's custom resources."""
    max_per_machine: Count | None = None


class Placements(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    prefill: Placement = Placement()
    decode: Placement = Placement()
    orchestrator: Placement = Placement()
