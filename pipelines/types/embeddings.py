"""Embeddings: one vector per text, computed in one step.

A `TextContext` is an EmbeddingsContext; an engine of another kind may bring its own.
"""

from dataclasses import dataclass
from typing import Any, Generic, Protocol, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypeVar

from pipelines.types.context import BaseContext
from pipelines.types.pipeline import PipelineInputs
from pipelines.types.token_buffer import TokenBuffer
from pronghorn.ids import RequestID


@runtime_checkable
class EmbeddingsContext(BaseContext, Protocol):
    @property
    def tokens(self) -> TokenBuffer: ...

    @property
    def model_name(self) -> str: ...


EmbeddingsContextT = TypeVar("EmbeddingsContextT", bound=EmbeddingsContext, default=EmbeddingsContext)


@dataclass(frozen=True)
class EmbeddingsGenerationInputs(PipelineInputs, Generic[EmbeddingsContextT]):
    batches: list[dict[RequestID, EmbeddingsContextT]]
    """One per data-parallel replica."""

    @property
    def batch(self) -> dict[RequestID, EmbeddingsContextT]:
        """All replicas' contexts; where an id is in two of them, the later one."""
        return {request_id: context for batch in self.batches for request_id, context in batch.items()}


class EmbeddingsGenerationOutput(msgspec.Struct, tag=True, omit_defaults=True, eq=False):
    """Compared by identity, since its array has no single truth value."""

    embeddings: NDArray[np.floating[Any]]
    """Floating point, [hidden size]."""

    @property
    def is_done(self) -> bool:
        """Always: there is one output to a request."""
        return True
