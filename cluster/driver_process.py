"""`python -m cluster.driver_process`: carries out the commands of `driver.py`, one a line on standard input.

It ends when its standard input does. What Ray prints goes to standard error, which is the run's log.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import assert_never

import msgspec

from cluster.driver import (
    Answer,
    Change,
    Command,
    Deploy,
    Done,
    Join,
    Joined,
    Progress,
    Refused,
    WaitUntilRunning,
    Withdraw,
)
from cluster.serve_application import ServeApplication
from pronghorn.errors import ConfigurationError


def serve(lines: Iterable[bytes], answer: Callable[[Answer], None]) -> None:
    application: ServeApplication | None = None
    for line in lines:
        try:
            command = msgspec.json.decode(line, type=Command)
            if isinstance(command, Join):
                application = ServeApplication(command.address, command.config)
                answer(Joined(application.dashboard_url))
                continue
            assert application is not None, "the Ray cluster was not joined"
            match command:
                case Deploy():
                    answer(application.deploy())
                case WaitUntilRunning(limit_s=limit_s):
                    application.wait_until_running(time.monotonic() + limit_s, lambda text: answer(Progress(text)))
                    answer(Done())
                case Change():
                    application.change(command, lambda text: answer(Progress(text)))
                    answer(Done())
                case Withdraw(limit_s=limit_s, serve_is_ours=serve_is_ours):
                    application.withdraw(limit_s, serve_is_ours)
                    answer(Done())
                case never:
                    assert_never(never)
        except ConfigurationError as error:
            answer(Refused(error.message))


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def answer(said: Answer) -> None:
        answers.write(msgspec.json.encode(said) + b"\n")
        answers.flush()

    serve(sys.stdin.buffer, answer)


if __name__ == "__main__":
    main()
