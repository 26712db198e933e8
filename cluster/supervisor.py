"""The process that brings one cluster up, stays with it, and takes it down: `python -m cluster.supervisor`.

`pronghorn up` becomes it (same terminal, same process id); `up --detach` starts it in a session of its own and reads
its announcements from a pipe. The first SIGINT, SIGTERM or SIGHUP drains; the second does not wait. It speaks to Ray
through a child (`driver.py`), whose chatter goes to the run's log.
"""

import argparse
import logging
import os
import sys
from pathlib import Path

from rich.console import Console

from cluster import signals
from cluster.announce import Announce, Announcement, Lines, Terminal
from cluster.bringup import Cluster
from cluster.config import environment
from cluster.run_folder import RunFolder
from pronghorn.errors import PronghornError

log = logging.getLogger("pronghorn.supervisor")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("name")
    parser.add_argument("--lock-fd", type=int, required=True)
    parser.add_argument("--announce-fd", type=int)
    options = parser.parse_args(arguments)

    os.set_inheritable(options.lock_fd, False)
    folder = RunFolder(options.root, options.name)
    folder.adopt(options.lock_fd)
    announce = _announcer(options.announce_fd)
    _redirect_output(folder.log_path)
    run = folder.run()
    assert run is not None, "the run was written before the supervisor was started"
    signals.listen(signals.interrupt)
    return supervise(Cluster(run, folder, environment(), os.getpid(), announce), announce)


def supervise(cluster: Cluster, announce: Announce) -> int:
    """The exit code: 0 where it was asked to end, 1 where the cluster could not go on."""
    failure: str | None = None
    try:
        signals.release()
        announce(Announcement("ready", state=cluster.start()))
        failure = cluster.watch()
    except KeyboardInterrupt:
        log.info("asked to end")
    except PronghornError as error:
        failure = error.message
    except Exception as error:  # the edge of this process: whatever it was, everything is ended below
        log.exception("the supervisor failed")
        failure = f"{type(error).__name__}: {error}"
    signals.listen(lambda _number, _frame: cluster.hurry())
    if failure is not None:
        log.error("%s", failure)
        announce(Announcement("failed", failure))
    cluster.stop()
    return 0 if failure is None else 1


def _announcer(announce_fd: int | None) -> Announce:
    if announce_fd is not None:
        os.set_inheritable(announce_fd, False)
        return Lines(os.fdopen(announce_fd, "wb"))
    # A copy of the terminal's descriptor: 1 and 2 are about to be the log.
    return Terminal(Console(file=os.fdopen(os.dup(1), "w")))


def _redirect_output(log_path: Path) -> None:
    fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
