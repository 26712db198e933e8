from hypothesis import given
from hypothesis import strategies as st

from orchestrator.api.choice import ChoiceText
from pipelines.types.status import GenerationStatus
from pipelines.types.text_output import TextGenerationOutput
from pronghorn.ids import RequestID
from tests.fakes.byte_tokenizer import END, byte_tokenizer

TOKENIZER = byte_tokenizer()


def play(tokens: list[int], sizes: list[int], stops: list[str], status: GenerationStatus) -> tuple[str, str | None]:
    """The text and the reason, where outputs of these sizes come."""
    choice = ChoiceText(0, TOKENIZER, stops, frozenset({END}))
    shown = ""
    sizes = [*sizes, len(tokens)]
    while True:
        taken, tokens = tokens[: sizes[0]], tokens[sizes[0] :]
        sizes = sizes[1:]
        last = not sizes
        piece = choice.accept(
            TextGenerationOutput(
                request_id=RequestID("r"),
                tokens=taken,
                final_status=status if last else GenerationStatus.ACTIVE,
            )
        )
        shown += piece.text
        if piece.finish_reason is not None or last:
            return shown, piece.finish_reason


@given(
    text=st.text("ab€😀", max_size=20),
    stops=st.lists(st.text("ab€", min_size=1, max_size=3), max_size=3),
    sizes=st.lists(st.integers(0, 5), max_size=20),
)
def test_the_text_is_the_same_however_the_tokens_come(text: str, stops: list[str], sizes: list[int]) -> None:
    tokens = [*text.encode(), END]
    streamed = play(tokens, sizes, stops, GenerationStatus.END_OF_SEQUENCE)
    assert streamed == play(tokens, [], stops, GenerationStatus.END_OF_SEQUENCE)
    shown, reason = streamed
    assert reason == "stop"
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)
    if not any(stop in text for stop in stops):
        assert shown == text


def test_the_token_that_ends_a_sequence_is_never_text() -> None:
    choice = ChoiceText(0, TOKENIZER, [], frozenset({ord("!")}))
    output = TextGenerationOutput(
        request_id=RequestID("r"), tokens=[*b"hey!"], final_status=GenerationStatus.END_OF_SEQUENCE
    )
    assert choice.accept(output).text == "hey"
    assert choice.completion_tokens == 4


def test_a_held_back_beginning_of_a_stop_string_is_shown_at_the_end() -> None:
    assert play([*b"abST"], [1, 1, 1, 1], ["STOP"], GenerationStatus.MAXIMUM_LENGTH) == ("abST", "length")
