import json
import time

import pytest

from pipelines.text.grammar import (
    MAX_SOURCE_CHARS,
    GrammarCompiler,
    GrammarSource,
    choice_source,
    grammar_source,
    json_schema_source,
    regex_source,
    repetitions,
)
from pronghorn.errors import ConfigurationError, InvalidRequest
from tests.fakes.tokenizer_folder import tiny_tokenizer

END = 2


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tiny_tokenizer().to_str(), 320, frozenset({END}))


def verdict(compiler: GrammarCompiler, source: GrammarSource, text: str) -> str:
    """Whether `text` is refused, begun or complete under `source`."""
    matcher = compiler.compile(source).matcher()
    if not matcher.consume(*compiler.tokens_of(text)):
        return "refused"
    return "complete" if matcher.complete else "begun"


class TestWhatIsAsked:
    def test_an_empty_schema_is_any_one_json_value(self, compiler: GrammarCompiler) -> None:
        for text in ("1", '"a"', "[]", "null", '{"a": [true]}'):
            assert verdict(compiler, json_schema_source({}), text) == "complete"
        assert verdict(compiler, json_schema_source({}), "hello") == "refused"
        assert verdict(compiler, json_schema_source({}), "1 2") == "refused"

    def test_a_boolean_schema_is_everything_or_nothing(self, compiler: GrammarCompiler) -> None:
        assert verdict(compiler, json_schema_source(True), "[1]") == "complete"
        with pytest.raises(InvalidRequest, match="allows no text at all"):
            json_schema_source(False)

    def test_a_root_without_a_type_that_speaks_of_properties_is_an_object(self, compiler: GrammarCompiler) -> None:
        source = json_schema_source({"properties": {"a": {"type": "integer"}}, "required": ["a"]})
        assert verdict(compiler, source, '{"a":1}') == "complete"
        assert verdict(compiler, source, "7") == "refused"
        assert verdict(compiler, json_schema_source({"enum": [7]}), "7") == "complete"

    def test_blanks_between_tokens_are_allowed_and_bounded(self, compiler: GrammarCompiler) -> None:
        source = json_schema_source({"type": "object"})
        assert verdict(compiler, source, '{\n  "a" : 1\n}') == "complete"
        assert verdict(compiler, source, "{" + " " * 17) == "refused"

    def test_a_client_cannot_change_how_a_schema_is_compiled(self, compiler: GrammarCompiler) -> None:
        source = json_schema_source({"type": "object", "x-guidance": {"whitespace_pattern": "x*"}})
        assert verdict(compiler, source, "{xx") == "refused"

    def test_a_pattern_is_the_whole_text(self, compiler: GrammarCompiler) -> None:
        source = regex_source("[a-z]+/[0-9]{2}")
        assert verdict(compiler, source, "ab/12") == "complete"
        assert verdict(compiler, source, "ab/1") == "begun"
        assert verdict(compiler, source, " ab") == "refused"

    @pytest.mark.parametrize(
        "grammar",
        ['start: greeting "!"\ngreeting: "hello" | "bye"', 'root ::= greeting "!"\ngreeting ::= "hello" | "bye"'],
    )
    def test_a_grammar_may_be_lark_or_the_ebnf_of_llama_cpp(self, compiler: GrammarCompiler, grammar: str) -> None:
        source = grammar_source(grammar)
        assert verdict(compiler, source, "bye!") == "complete"
        assert verdict(compiler, source, "bye?") == "refused"

    def test_a_choice_is_one_of_its_texts(self, compiler: GrammarCompiler) -> None:
        source = choice_source(["yes", 'no "really"\n'])
        assert verdict(compiler, source, 'no "really"\n') == "complete"
        assert verdict(compiler, source, "maybe") == "refused"

    def test_the_end_may_come_only_where_the_text_is_complete(self, compiler: GrammarCompiler) -> None:
        matcher = compiler.compile(choice_source(["ab"])).matcher()
        assert not matcher.allowed()[END]
        assert matcher.consume(*compiler.tokens_of("ab"))
        assert matcher.allowed().nonzero()[0].tolist() == [END]
        assert matcher.stopped

    def test_a_special_token_cannot_be_written_into_a_string(self, compiler: GrammarCompiler) -> None:
        matcher = compiler.compile(json_schema_source({"type": "string"})).matcher()
        assert matcher.consume(*compiler.tokens_of('"a'))
        assert not matcher.allowed()[[0, 1, 2]].any()

    def test_a_mark_is_a_special_token_where_it_is_one(self, compiler: GrammarCompiler) -> None:
        assert compiler.literal("<|im_start|>") == "<[1]>"
        assert compiler.literal('<"x">') == '"<\\"x\\">"'


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: regex_source("["),
            lambda: regex_source("(?=a)b"),
            lambda: grammar_source("start: nowhere"),
            lambda: grammar_source("%%%"),
            lambda: grammar_source("root ::= ((("),
            lambda: json_schema_source({"type": "array", "minItems": 2, "maxItems": 1}),
            lambda: json_schema_source({"type": "nothing"}),
            lambda: json_schema_source({"$ref": "https://example.org/elsewhere.json"}),
            lambda: json_schema_source({"type": "string", "pattern": "("}),
        ],
    )
    def test_what_cannot_be_compiled_says_why(self, compiler: GrammarCompiler, make: object) -> None:
        with pytest.raises(InvalidRequest) as caught:
            compiler.compile(make())  # type: ignore[operator]
        assert caught.value.param == "response_format"
        assert len(caught.value.message) > len("the response format cannot be compiled: ")

    @pytest.mark.parametrize(
        "make",
        [
            lambda: regex_source("(a{1000}){1000}"),
            lambda: regex_source("(((a{100}){100}){100}){100}"),
            lambda: regex_source("a{1000000}"),
            lambda: grammar_source("start: /(b{200}){200}/"),
            lambda: json_schema_source({"type": "string", "pattern": "^(c{400}){400}$"}),
            lambda: json_schema_source({"patternProperties": {"(d{400}){400}": {}}}),
            lambda: json_schema_source(
                {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(6)]} for i in range(12)]}
            ),
            lambda: json_schema_source({"enum": ["x" * MAX_SOURCE_CHARS]}),
            lambda: json_schema_source(nested(300)),
        ],
    )
    def test_what_was_made_to_cost_is_refused_before_it_costs(self, compiler: GrammarCompiler, make: object) -> None:
        started_s = time.process_time()
        with pytest.raises(InvalidRequest):
            compiler.compile(make())  # type: ignore[operator]
        assert time.process_time() - started_s < 5.0

    def test_a_verdict_is_kept(self, compiler: GrammarCompiler) -> None:
        source = json_schema_source({"enum": ["kept"]})
        assert compiler.compile(source) is compiler.compile(source)
        bad = regex_source("(")
        errors = []
        for _ in range(2):
            with pytest.raises(InvalidRequest) as caught:
                compiler.compile(bad)
            errors.append(caught.value)
        assert errors[0] is errors[1]

    def test_the_cache_is_bounded(self) -> None:
        compiler = GrammarCompiler(tiny_tokenizer().to_str(), 320, frozenset({END}))
        first = compiler.compile(choice_source(["0"]))
        for number in range(1, 300):
            compiler.compile(choice_source([str(number)]))
        assert compiler.compile(choice_source(["0"])) is not first

    def test_a_tokenizer_that_cannot_be_used_is_a_fault_of_the_configuration(self) -> None:
        with pytest.raises(ConfigurationError):
            GrammarCompiler("{}", 10, frozenset({1}))


@pytest.mark.parametrize(
    "pattern, times",
    [
        ("abc", 1),
        ("a{7}", 7),
        ("(a{10}b){20}c", 200),
        ("(a{10}){0,5}", 10),
        (r"\{9999}", 1),
        ("[{9999}]x", 1),
        ("((x{3}){4}){5}|y{2}", 60),
        ("(" * 50, 1),
        ("a{3}{4}", 12),
    ],
)
def test_nested_counts_multiply(pattern: str, times: int) -> None:
    assert repetitions(pattern) == times


def nested(depth: int) -> dict:
    schema: dict = {}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return json.loads(json.dumps(schema))
