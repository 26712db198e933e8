"""Stands for `cluster.driver_process`: what it does with a command is what the address in the first one says."""

import os
import sys
import time

import msgspec

from cluster.driver import Answer, Command, Done, Join, Joined, Progress, Refused

answers = os.fdopen(os.dup(1), "wb")


def say(answer: Answer) -> None:
    answers.write(msgspec.json.encode(answer) + b"\n")
    answers.flush()


def main() -> None:
    for line in sys.stdin.buffer:
        command = msgspec.json.decode(line, type=Command)
        if not isinstance(command, Join):
            say(Progress("half way"))
            say(Done())
            continue
        match command.address:
            case "answers":
                answers.write(b"Ray prints what it likes\n")
                say(Joined("http://dashboard"))
            case "refuses":
                say(Refused("no room"))
            case "dies":
                sys.exit(3)
            case "silent":
                time.sleep(60.0)


if __name__ == "__main__":
    main()
