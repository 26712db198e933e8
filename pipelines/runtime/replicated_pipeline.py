"""The pipelines of an engine's replicas as one: each computes its own inner batch, side by side.

Knows pipelines and batches; not devices. Invariants: a replica's pipeline is called by one thread alone, its own; a
step is over when every replica's part is, and no output of a padding context leaves.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from pipelines.runtime.request_failures import RequestFailures
from pipelines.types.batch import TextGenerationInputs
from pipelines.types.pipeline import Pipeline
from pipelines.types.text_context import TextContext
from pipelines.types.text_output import TextGenerationOutput
from pronghorn.errors import PronghornError
from pronghorn.ids import RequestID

TextInputs = TextGenerationInputs[TextContext]
TextPipeline = Pipeline[TextInputs, TextGenerationOutput]
Outputs = dict[RequestID, TextGenerationOutput]


class ReplicatedPipeline(Pipeline[TextInputs, TextGenerationOutput]):
    """`execute` takes an inner batch for each replica, some of them empty. Raises RequestFailures with those of every
    replica; where a replica raises anything else, that, once all have ended."""

    def __init__(self, replicas: Sequence[TextPipeline]) -> None:
        self.replicas = replicas
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=f"replica-{index}") for index in range(len(replicas))]

    @property
    def max_batch_size(self) -> int:
        return sum(replica.max_batch_size for replica in self.replicas)

    def execute(self, inputs: TextInputs) -> Outputs:
        running = [
            thread.submit(replica.execute, TextInputs(batches=[batch]))
            for thread, replica, batch in zip(self._threads, self.replicas, inputs.batches, strict=True)
            if batch
        ]
        wait(running)
        outputs, failures = _gather(running)
        for context in inputs.flat_batch:
            if context._is_padding_ctx:
                outputs.pop(context.request_id, None)
        if failures:
            raise RequestFailures(failures, outputs)
        return outputs

    def release(self, request_id: RequestID) -> None:
        for thread, replica in zip(self._threads, self.replicas, strict=True):
            thread.submit(replica.release, request_id).result()


def _gather(running: Sequence[Future[Outputs]]) -> tuple[Outputs, dict[RequestID, PronghornError]]:
    outputs: Outputs = {}
    failures: dict[RequestID, PronghornError] = {}
    for future in running:
        try:
            outputs |= future.result()
        except RequestFailures as error:
            outputs |= error.outputs
            failures |= error.failures
    return outputs, failures
