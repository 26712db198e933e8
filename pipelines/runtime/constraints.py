"""The constraints of the sequences that an engine computes: compiled beside the step, kept while a sequence runs.

Knows contexts and a tokenizer's folder. Compiling starts when a sequence is first seen in a batch, in a thread of its
own, so that the model computes the prompt meanwhile; only its own request waits for it where it is late. Invariants: a
constraint stands behind exactly the tokens that its context has generated, or is made anew; a request without a grammar
and without a bound on its thinking costs nothing here.
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from pipelines.runtime.constraint import Constraint
from pipelines.runtime.sampler import first_tokens
from pipelines.text.grammar import Grammar, GrammarCompiler, GrammarSource
from pipelines.types.text_context import TextContext
from pronghorn.errors import ConfigurationError, InvalidRequest
from pronghorn.ids import RequestID

COMPILE_WAIT_S = 5.0
"""How long a step waits for one grammar. The longest that was seen to pass the compiler's own bounds took 0.7 s."""


class Constraints:
    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        # Reading the vocabulary takes a quarter of a second: no request's first grammar should wait for it.
        self._compiler = self._thread.submit(self._open_compiler)
        self._grammars: dict[RequestID, Future[Grammar | None]] = {}
        self._constraints: dict[RequestID, Constraint] = {}

    def prepare(self, contexts: Iterable[TextContext]) -> None:
        """Start compiling what is new among `contexts`."""
        for context in contexts:
            if _is_constrained(context) and context.request_id not in self._grammars:
                self._grammars[context.request_id] = self._thread.submit(self._compile, context)

    def gates(self, context: TextContext) -> list[Constraint]:
        """What the next tokens of `context` must pass, one for each that `sampler.sample` draws; empty where any may
        come. Raises InvalidRequest for a grammar that cannot be used, InternalError where text that was generated
        before does not fit: such a request ends, and never goes on unconstrained."""
        if not _is_constrained(context):
            return []
        # The other choices' constraints are made anew where their sequences run, under ids of their own.
        others = [self._new(context) for _ in range(first_tokens(context) - 1)]
        return [self._constraint(context), *others]

    def release(self, request_id: RequestID) -> None:
        self._grammars.pop(request_id, None)
        self._constraints.pop(request_id, None)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _constraint(self, context: TextContext) -> Constraint:
        known = self._constraints.get(context.request_id)
        if known is not None and known.num_tokens == context.num_generated_tokens:
            return known
        made = self._constraints[context.request_id] = self._new(context)
        return made

    def _new(self, context: TextContext) -> Constraint:
        self.prepare([context])
        try:
            grammar = self._grammars[context.request_id].result(COMPILE_WAIT_S)
        except TimeoutError:
            raise InvalidRequest(
                f"the response format was not compiled within {COMPILE_WAIT_S:g} s", param="response_format"
            ) from None
        return Constraint(self._compiler.result(), grammar, context)

    def _open_compiler(self) -> GrammarCompiler:
        """In the thread. Raises InvalidRequest: a model without a tokenizer serves all other requests."""
        try:
            return GrammarCompiler.from_folder(self._folder, self._vocab_size)
        except ConfigurationError as error:
            raise InvalidRequest(error.message, param="response_format") from error

    def _compile(self, context: TextContext) -> Grammar | None:
        """In the thread."""
        compiler = self._compiler.result()
        source = _source(context)
        return None if source is None else compiler.compile(source)


def _is_constrained(context: TextContext) -> bool:
    return _source(context) is not None or (context.reasoning is not None and context.reasoning.max_tokens is not None)


def _source(context: TextContext) -> GrammarSource | None:
    if context.grammar is not None:
        return GrammarSource("grammar", context.grammar)
    if context.json_schema is not None:
        return GrammarSource("json_schema", context.json_schema)
    return None
