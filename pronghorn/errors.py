"""The error tree. Each leaf says whose fault it is, whether trying elsewhere can help, and its HTTP status.

    PronghornError
    +-- ClientError                     the request itself is wrong; trying again cannot help
    |   +-- InvalidRequest              400   a field, its value and its bound
    |   |   +-- ContextLengthExceeded   400
    |   +-- ModelNotFound               404
    |   +-- EndpointNotFound            404   target_endpoint names nobody, or a node of another role
    |   +-- RequestInProgress           409   the same X-Request-ID still runs; Retry-After
    |   +-- RequestTooLarge             413
    +-- ServiceError                    the request is fine; the service could not do it now
    |   +-- Overloaded                  429   a bounded queue is full; Retry-After
    |   +-- Unavailable                 503   no node can take it; Retry-After
    |   |   +-- NodeLost                503   the stream to the node broke or fell silent
    |   |   +-- NodeRefused             503   the node says no: before starting, or because it leaves
    |   |   +-- HandshakeRefused        503   version, layout, seed or incarnation differ
    |   |   +-- TransferFailed          503   blocks did not arrive whole
    |   |   +-- NoPrefill               503   no prefill node can be asked, and decode has no room to compute the prompt
    |   +-- InsufficientBlocks          503   the KV pool cannot hold it
    |   +-- DeadlineExceeded            504
    |   +-- Cancelled                   499   whoever asked has gone
    |   +-- EngineDied                  503   the engine process ended or stopped stepping
    |   +-- InternalError               500
    |   +-- PoisonRequest               500   nodes have died under the request; it is tried no more
    +-- ConfigurationError              a start that cannot work: one line, exit code not 0

Foreign errors are translated into these once, at the edge where they come in.
"""

from typing import ClassVar

import msgspec


class ErrorRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error as it crosses a process. `kind` is the class name of a leaf of the tree."""

    kind: str
    message: str
    code: str | None = None
    param: str | None = None
    retry_after_s: float | None = None


class PronghornError(Exception):
    """Root of the tree. `code` is OpenAI's error code where one exists; `param` names the field at fault."""

    http_status: ClassVar[int] = 500
    error_type: ClassVar[str] = "api_error"
    default_code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False
    """True where another node may succeed with the same request."""

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.param = param
        self.retry_after_s = retry_after_s

    def record(self) -> ErrorRecord:
        return ErrorRecord(type(self).__name__, self.message, self.code, self.param, self.retry_after_s)


class ClientError(PronghornError):
    http_status = 400
    error_type = "invalid_request_error"
    default_code = "invalid_request"


class InvalidRequest(ClientError):
    default_code = "invalid_value"


class ContextLengthExceeded(InvalidRequest):
    default_code = "context_length_exceeded"


class ModelNotFound(ClientError):
    http_status = 404
    error_type = "not_found_error"
    default_code = "model_not_found"


class EndpointNotFound(ClientError):
    http_status = 404
    error_type = "not_found_error"
    default_code = "endpoint_not_found"


class RequestInProgress(ClientError):
    http_status = 409
    default_code = "request_in_progress"


class RequestTooLarge(ClientError):
    http_status = 413
    default_code = "request_too_large"


class ServiceError(PronghornError):
    pass


class Overloaded(ServiceError):
    http_status = 429
    error_type = "rate_limit_error"
    default_code = "rate_limit_exceeded"


class Unavailable(ServiceError):
    http_status = 503
    default_code = "unavailable"
    retryable = True


class NodeLost(Unavailable):
    default_code = "node_lost"


class NodeRefused(Unavailable):
    default_code = "node_refused"


class HandshakeRefused(Unavailable):
    default_code = "handshake_refused"


class TransferFailed(Unavailable):
    default_code = "transfer_failed"


class NoPrefill(Unavailable):
    default_code = "no_prefill"


class InsufficientBlocks(ServiceError):
    http_status = 503
    default_code = "insufficient_blocks"
    retryable = True


class DeadlineExceeded(ServiceError):
    http_status = 504
    default_code = "deadline_exceeded"


class Cancelled(ServiceError):
    http_status = 499
    default_code = "cancelled"


class EngineDied(ServiceError):
    http_status = 503
    default_code = "engine_died"
    retryable = True


class InternalError(ServiceError):
    pass


class PoisonRequest(ServiceError):
    default_code = "poison_request"


class ConfigurationError(PronghornError):
    default_code = "configuration_error"


def _leaves(cls: type[PronghornError]) -> dict[str, type[PronghornError]]:
    return {cls.__name__: cls} | {k: v for sub in cls.__subclasses__() for k, v in _leaves(sub).items()}


_BY_NAME = _leaves(PronghornError)


def from_record(record: ErrorRecord) -> PronghornError:
    """The error that `record` describes; a kind that this version does not know becomes an InternalError."""
    cls = _BY_NAME.get(record.kind, InternalError)
    return cls(record.message, code=record.code, param=record.param, retry_after_s=record.retry_after_s)
