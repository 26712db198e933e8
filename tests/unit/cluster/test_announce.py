import io

from msgspec.structs import replace
from rich.console import Console

from cluster.announce import Announcement, Lines, Terminal, detail, note, read_lines, ready_message, stage
from cluster.run_folder import RunState


def test_lines_are_read_back_as_they_were_said() -> None:
    said = [stage("one"), detail("half"), note("aside"), Announcement("ready", state=RunState("ready", 7, url="u"))]
    stream = io.BytesIO()
    for announcement in said:
        Lines(stream)(announcement)
    assert list(read_lines(stream.getvalue().splitlines())) == said


def test_a_reader_that_has_gone_is_no_fault() -> None:
    stream = io.BytesIO()
    stream.close()
    Lines(stream)(stage("one"))


def test_a_stage_is_ticked_off_when_the_next_begins_and_not_when_it_failed() -> None:
    shown = io.StringIO()
    terminal = Terminal(Console(file=shown, width=100))
    for announcement in (stage("one"), stage("two"), Announcement("failed", "no luck in [/a/path:7]")):
        terminal(announcement)
    assert "✓ one" in shown.getvalue()
    assert "two" not in shown.getvalue()
    assert "error: no luck in [/a/path:7]" in shown.getvalue()


def test_the_ready_message_names_what_to_try() -> None:
    shown = io.StringIO()
    state = RunState("ready", 7, url="http://127.0.0.1:8000", dashboard_url="http://127.0.0.1:8265")
    Terminal(Console(file=shown, width=200))(Announcement("ready", state=state))
    for expected in (
        "http://127.0.0.1:8000/v1",
        "http://127.0.0.1:8265",
        "curl -N",
        '"role": "user"',
        "pronghorn chat",
    ):
        assert expected in shown.getvalue()


def test_of_several_models_what_to_try_names_one() -> None:
    state = RunState("ready", 1, url="http://127.0.0.1:8000", models=["a", "b"])
    message = ready_message(state)
    assert '{"model": "a", "messages": [{"role": "user"' in message and "--model a" in message
    assert "model" not in ready_message(replace(state, models=["a"]))
