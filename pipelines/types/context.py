"""What every request's state is to whoever schedules it, whatever the request generates."""

from typing import Protocol, runtime_checkable

from pipelines.types.status import GenerationStatus
from pronghorn.ids import RequestID


@runtime_checkable
class BaseContext(Protocol):
    @property
    def request_id(self) -> RequestID: ...

    status: GenerationStatus

    @property
    def is_done(self) -> bool: ...
