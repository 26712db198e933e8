"""What a scheduler says of one request after one step. One message carries them for a whole batch, by request id."""

from typing import Generic

import msgspec
from typing_extensions import TypeVar

from pipelines.types.pipeline import PipelineOutput

ResultT = TypeVar("ResultT", bound=PipelineOutput)


class SchedulerResult(msgspec.Struct, Generic[ResultT]):
    """Made by one of its constructors. To be decoded it must be named with its result's type."""

    is_done: bool
    """No further result follows."""
    result: ResultT | None = None
    error: str | None = None
    """Why the request failed, for its client."""

    @classmethod
    def create(cls, result: ResultT) -> "SchedulerResult[ResultT]":
        return cls(is_done=result.is_done, result=result)

    @classmethod
    def cancelled(cls) -> "SchedulerResult[ResultT]":
        return cls(is_done=True)

    @classmethod
    def failed(cls, error: str) -> "SchedulerResult[ResultT]":
        return cls(is_done=True, error=error)
