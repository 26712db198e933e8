"""How a pipeline says that some requests of a batch failed while the rest of the batch is fine."""

from collections.abc import Mapping

from pipelines.types.text_output import TextGenerationOutput
from pronghorn.errors import PronghornError
from pronghorn.ids import RequestID


class RequestFailures(Exception):
    """Raised by `execute` after the step. The contexts named in `failures` were not updated; every other context of
    the batch was, and `outputs` is what `execute` would have returned for those."""

    def __init__(
        self,
        failures: Mapping[RequestID, PronghornError],
        outputs: Mapping[RequestID, TextGenerationOutput] | None = None,
    ) -> None:
        super().__init__("; ".join(f"{request_id}: {error}" for request_id, error in failures.items()))
        self.failures = dict(failures)
        self.outputs = dict(outputs or {})
