"""What every pipeline is to a scheduler, whatever it generates."""

from abc import ABC, abstractmethod
from typing import Any, Generic, Protocol, runtime_checkable

from typing_extensions import TypeVar

from pronghorn.ids import RequestID


class PipelineInputs:
    """Marks what a pipeline's `execute` takes."""


@runtime_checkable
class PipelineOutput(Protocol):
    """What `execute` returns per request. A Protocol, because a msgspec Struct cannot inherit from an ABC."""

    @property
    def is_done(self) -> bool: ...


InputsT = TypeVar("InputsT", bound=PipelineInputs, default=Any)
OutputT = TypeVar("OutputT", bound=PipelineOutput, default=Any)

PipelineOutputsDict = dict[RequestID, OutputT]


class Pipeline(ABC, Generic[InputsT, OutputT]):
    @property
    @abstractmethod
    def max_batch_size(self) -> int:
        """The most sequences of one `execute`."""

    @abstractmethod
    def execute(self, inputs: InputsT) -> PipelineOutputsDict[OutputT]:
        """Compute one step. May return fewer ids than went in: a prompt that is not complete yet gives nothing."""

    @abstractmethod
    def release(self, request_id: RequestID) -> None:
        """Forget what is kept for this request. Unknown ids are fine. KV blocks belong to the scheduler."""
