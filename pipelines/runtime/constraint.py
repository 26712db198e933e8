"""Which tokens may come next in one sequence: its grammar, and what suspends it.

    (start) --> THINKING --end mark--> ENFORCED --grammar's end, woken once--> DORMANT, CLOSED
       |            '----- trigger -------^  ^
       '------> DORMANT --- trigger ---------'
       every state --end token--> OVER

Thinking is not constrained, but where a grammar must follow it may not be the end; at its budget its end mark is
forced. A dormant grammar wakes where one of its triggers appears, and is fed the text from the trigger's first
character on. End tokens are never fed. Marks and triggers are looked for in the bytes that tokens write, since the
same text falls into tokens in many ways.

A pure function of the context's grammar fields and its generated tokens: made anew it says the same, on any node, after
any preemption. Must not know logits or other sequences.
"""

from collections.abc import Sequence
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from pipelines.text.grammar import Grammar, GrammarCompiler, Matcher
from pipelines.types.grammar_state import GrammarState
from pipelines.types.text_context import TextContext
from pronghorn.errors import InternalError


class State(Enum):
    THINKING = auto()
    DORMANT = auto()
    ENFORCED = auto()
    CLOSED = auto()
    """The one call that was allowed is complete: only the end may follow."""
    FREE = auto()
    """No grammar applies to the answer."""
    OVER = auto()
    """An end token has come; under `ignore_eos` more tokens may follow it."""


class Constraint:
    def __init__(self, compiler: GrammarCompiler, grammar: Grammar | None, context: TextContext) -> None:
        """Behind the tokens that `context` has generated. Raises InternalError where one of them does not fit: text
        that was not constrained must never be passed off as if it were."""
        self._compiler = compiler
        self._grammar = grammar
        self._rules = context.grammar_state or GrammarState(enforced=True)
        self._span = context.reasoning
        self._end_ids = context.eos_tracker.eos_token_ids | compiler.eos_ids
        self._thinking_start = self._single_token(self._span.start) if self._span else None
        self._thought_tokens = 0
        self._forced: list[int] = []
        self._tail = b""
        """What was written since the state began, as far back as a mark can reach; after `_begins` from its start."""
        self._begins = True
        """Nothing of the answer itself is written yet, but white space."""
        self._matcher: Matcher | None = None
        self._woken = False
        self.num_tokens = 0
        """Tokens taken in."""
        self._state = State.FREE
        self._enter(State.THINKING if context.in_reasoning_phase and self._span else self._answer_state())
        for token in context.tokens[context.original_prompt_length :].tolist():
            if not self.accept(token):
                raise InternalError(f"token {token}, generated before, does not fit the request's response format")

    # --- what may come -----------------------------------------------------------------------------------------------

    def allowed(self) -> NDArray[np.bool_] | None:
        """[vocab], or None where every token may come. Raises InvalidRequest where the grammar costs too much."""
        if self._forced:
            return self._only(self._forced[:1])
        if self._state is State.THINKING and self._grammar_must_follow():
            return ~self._only(self._end_ids)
        if self._state is State.CLOSED:
            return self._only(self._end_ids)
        if self._state is not State.ENFORCED:
            return None
        assert self._matcher is not None
        mask = self._matcher.allowed().copy()
        # Which tokens end this sequence is the request's business, whether one may come here the grammar's.
        ends = [token for token in self._end_ids if token < len(mask)]
        if self._matcher.complete:
            mask[ends] = True
        else:
            mask[[token for token in ends if token in self._compiler.eos_ids]] = False
        if self._may_begin_to_think():
            mask[self._thinking_start] = True
        return mask

    def accept(self, token: int) -> bool:
        """Go on by `token`; False where it must not come, and then it is as if it had not been asked."""
        if not self._take(token):
            return False
        self.num_tokens += 1
        return True

    def _take(self, token: int) -> bool:
        if self._is_end(token):
            if self._state is State.THINKING and self._grammar_must_follow():
                return False
            # Under `ignore_eos` more is sampled: behind a grammar's text nothing but ends.
            self._enter(State.CLOSED if self._state in (State.ENFORCED, State.CLOSED) else State.OVER)
            return True
        match self._state:
            case State.THINKING:
                return self._think(token)
            case State.DORMANT:
                return self._watch(token)
            case State.ENFORCED:
                return self._follow(token)
            case State.CLOSED:
                return False
            case State.FREE | State.OVER:
                self._begin_to_think_if(token)
                return True

    def _is_end(self, token: int) -> bool:
        """An id that a request stops at may be a word of the grammar's: it ends the text only where that may end."""
        if self._state is State.ENFORCED:
            assert self._matcher is not None
            return token in self._end_ids and self._matcher.complete
        return token in self._end_ids

    # --- thinking ----------------------------------------------------------------------------------------------------

    def _may_begin_to_think(self) -> bool:
        return self.num_tokens == 0 and self._thinking_start is not None

    def _begin_to_think_if(self, token: int) -> bool:
        if self._may_begin_to_think() and token == self._thinking_start:
            self._enter(State.THINKING)
            return True
        return False

    def _think(self, token: int) -> bool:
        assert self._span is not None
        if self._forced and token != self._forced[0]:
            return False
        tail = self._tail + self._compiler.token_bytes(token)
        mark = self._span.end.encode()
        at = tail.find(mark)
        if at >= 0:
            if not self._leave_thinking(tail[at + len(mark) :]):
                return False
        elif self._grammar is not None and (place := self._trigger(tail, at_start=False)) is not None:
            return self._wake(tail[place:], token)
        else:
            self._tail = tail[-self._reach() :]
        self._thought_tokens += 1
        if self._forced:
            self._forced = self._forced[1:]
        elif self._state is State.THINKING:
            self._bound_thinking()
        return True

    def _bound_thinking(self) -> None:
        assert self._span is not None
        if self._span.max_tokens is not None and self._thought_tokens >= self._span.max_tokens:
            self._forced = self._compiler.tokens_of(self._span.end)

    def _leave_thinking(self, rest: bytes) -> bool:
        """`rest` was written by the token that ended the mark."""
        answer = self._answer_state()
        if answer is State.ENFORCED and rest:
            matcher = self._new_matcher()
            if not matcher.consume(*self._compiler.tokens_of(rest)):
                return False
            self._enter(answer)
            self._matcher = matcher
        else:
            self._enter(answer)
            self._tail = rest
        return True

    def _grammar_must_follow(self) -> bool:
        return self._answer_state() is State.ENFORCED

    # --- the answer --------------------------------------------------------------------------------------------------

    def _answer_state(self) -> State:
        rules = self._rules
        if self._grammar is None:
            return State.FREE
        if rules.enforced or rules.tools_forced or rules.has_json_schema:
            return State.ENFORCED
        return State.DORMANT if rules.triggers or rules.triggers_at_start else State.FREE

    def _watch(self, token: int) -> bool:
        if self._begin_to_think_if(token):
            return True
        tail = self._tail + self._compiler.token_bytes(token)
        if (place := self._trigger(tail, at_start=self._begins)) is not None:
            return self._wake(tail[place:], token)
        longest = max(map(len, self._rules.triggers_at_start), default=0)
        if self._begins and len(tail.lstrip()) > longest * 4:
            self._begins = False
        self._tail = tail.lstrip() if self._begins else tail[-self._reach() :]
        return True

    def _trigger(self, tail: bytes, *, at_start: bool) -> int | None:
        """Where in `tail` the first trigger that is complete begins."""
        places = [tail.find(trigger.encode()) for trigger in self._rules.triggers]
        if at_start:
            answer = tail.lstrip()
            offset = len(tail) - len(answer)
            places += [offset for trigger in self._rules.triggers_at_start if answer.startswith(trigger.encode())]
        return min((place for place in places if place >= 0), default=None)

    def _wake(self, written: bytes, token: int) -> bool:
        """`written` starts with a trigger and ends with `token`."""
        matcher = self._new_matcher()
        own = self._compiler.token_bytes(token)
        tokens = [token] if own == written else self._compiler.tokens_of(written)
        if not matcher.consume(*tokens):
            return False
        self._enter(State.ENFORCED)
        self._matcher, self._woken = matcher, True
        self._end_of_grammar()
        return True

    def _follow(self, token: int) -> bool:
        assert self._matcher is not None
        if self._begin_to_think_if(token):
            return True
        if not self._matcher.consume(token):
            return False
        self._end_of_grammar()
        return True

    def _end_of_grammar(self) -> None:
        assert self._matcher is not None
        if self._woken and self._matcher.stopped:
            self._woken = False
            self._enter(State.DORMANT if self._rules.repeats else State.CLOSED)

    # --- small things ------------------------------------------------------------------------------------------------

    def _enter(self, state: State) -> None:
        self._state = state
        self._tail = b""
        self._forced = []
        if state is State.ENFORCED:
            self._matcher = self._new_matcher()
        else:
            self._matcher = None
        if state is State.THINKING:
            self._bound_thinking()

    def _new_matcher(self) -> Matcher:
        assert self._grammar is not None
        return self._grammar.matcher()

    def _reach(self) -> int:
        """Bytes that may still become part of a mark."""
        marks = [*self._rules.triggers, *([self._span.end] if self._span else [])]
        return max((len(mark.encode()) for mark in marks), default=1)

    def _only(self, tokens: set[int] | frozenset[int] | Sequence[int]) -> NDArray[np.bool_]:
        mask = np.zeros(self._compiler.vocab_size, dtype=np.bool_)
        mask[[token for token in tokens if token < len(mask)]] = True
        return mask

    def _single_token(self, mark: str) -> int | None:
        tokens = self._compiler.tokens_of(mark)
        return tokens[0] if len(tokens) == 1 else None
