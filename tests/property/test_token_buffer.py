"""TokenBuffer against a model made of lists and plain numbers."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pipelines.types import wire
from pipelines.types.token_buffer import TokenBuffer

TOKENS = st.integers(0, 2**40)


class BufferMachine(RuleBasedStateMachine):
    @initialize(prompt=st.lists(TOKENS, min_size=1, max_size=12))
    def start(self, prompt: list[int]) -> None:
        self.buffer = TokenBuffer(np.array(prompt, dtype=np.int64))
        self.tokens = list(prompt)
        self.prompt = len(prompt)
        self.untaken: list[int] = []
        self.done, self.end, self.offset = 0, len(prompt), 0

    @property
    def active(self) -> int:
        return self.end - self.done - self.offset

    @property
    def chunked(self) -> bool:
        return self.end < len(self.tokens)

    @rule(data=st.data())
    @precondition(lambda self: self.active > 1)
    def chunk(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(1, self.active - 1))
        self.buffer.chunk(n)
        self.end = self.done + self.offset + n

    @rule()
    @precondition(lambda self: self.chunked)
    def advance_chunk(self) -> None:
        self.buffer.advance_chunk()
        self.done, self.end, self.offset = self.end, len(self.tokens), 0

    @rule(data=st.data())
    def skip(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(0, self.active - 1))
        self.buffer.skip_processing(n)
        self.done += n

    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(0, self.done))
        self.buffer.rewind_processing(n)
        self.done -= n

    @rule(data=st.data())
    def shift(self, data: st.DataObject) -> None:
        self.offset = data.draw(st.integers(0, self.end - self.done - 1))
        self.buffer.apply_processing_offset(self.offset)

    @rule(token=TOKENS)
    @precondition(lambda self: not self.chunked)
    def generate(self, token: int) -> None:
        self.buffer.advance_with_token(token)
        self.tokens.append(token)
        self.untaken.append(token)
        self.done, self.end, self.offset = self.end, len(self.tokens), 0

    @rule(token=TOKENS)
    @precondition(lambda self: self.untaken)
    def overwrite(self, token: int) -> None:
        self.buffer.overwrite_last_token(token)
        self.tokens[-1] = self.untaken[-1] = token

    @rule(data=st.data())
    @precondition(lambda self: self.untaken)
    def take(self, data: st.DataObject) -> None:
        left = data.draw(st.integers(0, len(self.untaken) - 1))
        taken = self.buffer.consume_recently_generated_tokens(left).tolist()
        assert taken == self.untaken[: len(self.untaken) - left]
        self.untaken = self.untaken[len(taken) :]

    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        dropped = data.draw(st.integers(0, min(1, len(self.tokens) - self.prompt)))
        self.buffer.reset_as_new_prompt(dropped)
        self.tokens = self.tokens[: len(self.tokens) - dropped]
        self.prompt = self.end = len(self.tokens)
        self.done = self.offset = 0
        self.untaken = []

    @rule()
    def cross_a_process(self) -> None:
        self.buffer = wire.decode(wire.encode(self.buffer), TokenBuffer)

    @invariant()
    def agrees(self) -> None:
        buffer = self.buffer
        assert len(buffer) == len(self.tokens) and buffer.all.tolist() == self.tokens
        assert buffer.prompt.tolist() == self.tokens[: self.prompt]
        assert buffer.generated.tolist() == self.tokens[self.prompt :]
        assert buffer.active.tolist() == self.tokens[self.done + self.offset : self.end]
        assert buffer.active_length == self.active > 0
        assert buffer.processed_length == self.done
        assert buffer.current_position == self.done + self.active
        assert buffer.actively_chunked == self.chunked
        assert buffer.num_outstanding_generated_tokens == len(self.untaken)


BufferMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTokenBuffer = BufferMachine.TestCase
