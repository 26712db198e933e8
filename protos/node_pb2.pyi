from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Hello(_message.Message):
    __slots__ = ("protocol_version", "oldest_protocol_version", "role", "name", "incarnation", "model", "layout", "seed_digest")
    class LayoutEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SEED_DIGEST_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    oldest_protocol_version: int
    role: str
    name: str
    incarnation: str
    model: str
    layout: _containers.ScalarMap[str, str]
    seed_digest: str
    def __init__(self, protocol_version: _Optional[int] = ..., oldest_protocol_version: _Optional[int] = ..., role: _Optional[str] = ..., name: _Optional[str] = ..., incarnation: _Optional[str] = ..., model: _Optional[str] = ..., layout: _Optional[_Mapping[str, str]] = ..., seed_digest: _Optional[str] = ...) -> None: ...

class FenceMessage(_message.Message):
    __slots__ = ("request_id", "attempt", "incarnation")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    incarnation: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., incarnation: _Optional[str] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("hello", "holder_incarnation", "hashes", "budget_s", "patience_s")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HOLDER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_S_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_S_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    holder_incarnation: str
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    budget_s: float
    patience_s: float
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., holder_incarnation: _Optional[str] = ..., hashes: _Optional[_Iterable[bytes]] = ..., budget_s: _Optional[float] = ..., patience_s: _Optional[float] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("hello", "fence", "prefill_incarnation", "context", "wanted", "budget_s")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    BUDGET_S_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    fence: FenceMessage
    prefill_incarnation: str
    context: bytes
    wanted: _containers.RepeatedScalarFieldContainer[int]
    budget_s: float
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., fence: _Optional[_Union[FenceMessage, _Mapping]] = ..., prefill_incarnation: _Optional[str] = ..., context: _Optional[bytes] = ..., wanted: _Optional[_Iterable[int]] = ..., budget_s: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("incarnation", "grace_s")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    grace_s: float
    def __init__(self, incarnation: _Optional[str] = ..., grace_s: _Optional[float] = ...) -> None: ...
