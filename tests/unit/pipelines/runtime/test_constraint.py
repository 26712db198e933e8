"""The constraint of one sequence, over a tokenizer whose tokens are bytes, and one whose marks are special tokens."""

import numpy as np
import pytest
from tokenizers import AddedToken

from pipelines.runtime.constraint import Constraint
from pipelines.text.grammar import GrammarCompiler, GrammarSource, choice_source, json_schema_source
from pipelines.types.eos import EOSTracker
from pipelines.types.grammar_state import GrammarState
from pipelines.types.reasoning_span import ReasoningSpan
from pipelines.types.text_context import TextContext
from pipelines.types.token_buffer import TokenBuffer
from pronghorn.errors import InternalError
from tests.fakes.tokenizer_folder import tiny_tokenizer

END = 2
CALL = GrammarSource("grammar", 'start: "<call>" /[0-9]+/ "</call>"')


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tiny_tokenizer().to_str(), 320, frozenset({END}))


@pytest.fixture(scope="module")
def thinker() -> GrammarCompiler:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<think>", special=True), AddedToken("</think>", special=True)])
    return GrammarCompiler(tokenizer.to_str(), 320, frozenset({END}))


class Sequence:
    def __init__(self, compiler: GrammarCompiler, source: GrammarSource | None, **fields: object) -> None:
        self.compiler = compiler
        self.context = TextContext(
            max_length=1000,
            tokens=TokenBuffer(np.array([5], dtype=np.int64)),
            eos_tracker=EOSTracker(eos_token_ids={END}),
            **fields,  # type: ignore[arg-type]
        )
        self.source = source
        self.constraint = self.anew()

    def anew(self) -> Constraint:
        grammar = None if self.source is None else self.compiler.compile(self.source)
        return Constraint(self.compiler, grammar, self.context)

    def says(self, text: str) -> bool:
        return all(self.takes(token) for token in self.compiler.tokens_of(text))

    def takes(self, token: int) -> bool:
        allowed = self.constraint.allowed()
        if not self.constraint.accept(token):
            return False
        assert allowed is None or allowed[token]
        self.context.update(token)
        return True

    @property
    def may_end(self) -> bool:
        allowed = self.constraint.allowed()
        return allowed is None or bool(allowed[END])

    @property
    def must_end(self) -> bool:
        allowed = self.constraint.allowed()
        return allowed is not None and allowed.nonzero()[0].tolist() == [END]


class TestEnforced:
    def test_the_first_token_obeys(self, compiler: GrammarCompiler) -> None:
        sequence = Sequence(compiler, choice_source(["yes", "no"]))
        assert not sequence.says("m")
        assert not sequence.may_end
        assert sequence.says("no")
        assert sequence.must_end
        assert sequence.takes(END)

    def test_a_refused_token_leaves_the_sequence_where_it_was(self, compiler: GrammarCompiler) -> None:
        sequence = Sequence(compiler, choice_source(["yes"]))
        assert sequence.says("y")
        assert not sequence.says("x")
        assert sequence.says("es")

    def test_behind_the_end_nothing_but_ends_may_come(self, compiler: GrammarCompiler) -> None:
        sequence = Sequence(compiler, choice_source(["yes"]), ignore_eos=True)
        sequence.context.eos_tracker = EOSTracker()
        assert sequence.says("yes")
        assert sequence.takes(END)
        assert not sequence.says("more")
        assert sequence.must_end

    def test_an_id_that_the_request_stops_at_may_be_a_word_of_the_grammar(self, compiler: GrammarCompiler) -> None:
        sequence = Sequence(compiler, choice_source(["aba"]))
        sequence.context.eos_tracker = EOSTracker(eos_token_ids={END, *compiler.tokens_of("b")})
        sequence.constraint = sequence.anew()
        assert sequence.says("aba")

    def test_made_anew_it_stands_where_the_tokens_end(self, compiler: GrammarCompiler) -> None:
        sequence = Sequence(compiler, json_schema_source({"type": "object", "required": ["a"]}))
        assert sequence.says('{"a": [1, ')
        sequence.context.reset()
        np.testing.assert_array_equal(sequence.anew().allowed(), sequence.constraint.allowed())

    def test_tokens_that_were_never_constrained_are_an_error(self, compiler: GrammarCompiler) -> None:
        sequence = Sequence(compiler, choice_source(["yes"]))
        for token in compiler.tokens_of("hello"):
            sequence.context.update(token)
        with pytest.raises(InternalError, match="does not fit"):
            sequence.anew()


class TestDormant:
    STATE = GrammarState(triggers=["<call>"])

    def test_text_is_free_until_the_trigger_and_again_after_the_call(self, compiler: GrammarCompiler) -> None:
        sequence = Sequence(compiler, CALL, grammar_state=self.STATE)
        assert sequence.says("any text < at <cal all <call>")
        assert not sequence.says("x")
        assert not sequence.may_end
        assert sequence.says("12</call> free again")
        assert sequence.may_end
        assert sequence.says("<call>")
        assert not sequence.says("x")

    def test_after_the_only_call_nothing_but_the_end_may_come(self, compiler: GrammarCompiler) -> None:
        sequence = Sequence(compiler, CALL, grammar_state=GrammarState(triggers=["<call>"], repeats=False))
        assert sequence.says("hm <call>1</call>")
        assert sequence.must_end
        assert not sequence.says("x")

    def test_a_trigger_at_the_start_counts_only_there(self, compiler: GrammarCompiler) -> None:
        source = GrammarSource("grammar", 'start: "[go" "(" /[0-9]+/ ")]"')
        state = GrammarState(triggers_at_start=["[go("])
        sequence = Sequence(compiler, source, grammar_state=state)
        assert sequence.says(" \n[go(")
        assert not sequence.says("x")
        later = Sequence(compiler, source, grammar_state=state)
        assert later.says("I could say [go(x")

    def test_a_token_that_reaches_beyond_the_trigger_must_fit(self) -> None:
        tokenizer = tiny_tokenizer()
        tokenizer.add_tokens(["all>x", "all>7"])
        compiler = GrammarCompiler(tokenizer.to_str(), 320, frozenset({END}))
        wrong, right = tokenizer.token_to_id("all>x"), tokenizer.token_to_id("all>7")
        sequence = Sequence(compiler, CALL, grammar_state=self.STATE)
        assert sequence.says("<c")
        assert not sequence.takes(wrong)
        assert sequence.takes(right)
        assert sequence.says("1</call>")

    def test_made_anew_it_is_asleep_or_awake_as_before(self, compiler: GrammarCompiler) -> None:
        for text in ("free <ca", "free <call>1", "<call>1</call> x"):
            sequence = Sequence(compiler, CALL, grammar_state=self.STATE)
            assert sequence.says(text)
            again, before = sequence.anew().allowed(), sequence.constraint.allowed()
            assert (again is None) == (before is None)
            if again is not None and before is not None:
                np.testing.assert_array_equal(again, before)


class TestThinking:
    SPAN = ReasoningSpan(start="<think>", end="</think>")

    @pytest.mark.parametrize("special", [False, True])
    def test_enforcement_waits_for_the_end_of_thinking(
        self, compiler: GrammarCompiler, thinker: GrammarCompiler, special: bool
    ) -> None:
        sequence = Sequence(
            thinker if special else compiler, choice_source(["yes"]), in_reasoning_phase=True, reasoning=self.SPAN
        )
        assert sequence.says("no, maybe")
        assert not sequence.may_end
        assert not sequence.takes(END)
        assert sequence.says("</think>")
        assert not sequence.says("no")
        assert sequence.says("yes")
        assert sequence.must_end

    def test_a_model_may_open_thinking_itself(self, thinker: GrammarCompiler) -> None:
        sequence = Sequence(thinker, choice_source(["yes"]), reasoning=self.SPAN)
        assert sequence.says("<think>no</think>yes")
        assert sequence.must_end
        plain = Sequence(thinker, choice_source(["yes"]), reasoning=self.SPAN)
        assert plain.says("y")
        assert not plain.says("<think>")

    def test_a_call_inside_thinking_ends_it(self, compiler: GrammarCompiler) -> None:
        state = GrammarState(triggers=["<call>"])
        sequence = Sequence(compiler, CALL, grammar_state=state, in_reasoning_phase=True, reasoning=self.SPAN)
        assert sequence.says("I think <call>")
        assert not sequence.says("x")
        assert sequence.says("1</call>")

    @pytest.mark.parametrize("budget", [0, 3])
    def test_at_its_budget_thinking_is_made_to_end(self, compiler: GrammarCompiler, budget: int) -> None:
        span = ReasoningSpan(start="<think>", end="</think>", max_tokens=budget)
        sequence = Sequence(compiler, None, in_reasoning_phase=True, reasoning=span)
        assert sequence.says("x" * budget)
        forced = b""
        while (allowed := sequence.constraint.allowed()) is not None:
            (token,) = allowed.nonzero()[0]
            assert sequence.takes(int(token))
            forced += compiler.token_bytes(int(token))
        assert forced == b"</think>"
        assert sequence.says("free")
