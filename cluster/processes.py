"""Which processes of this machine belong to a run, and how they are ended: by pid, exactly those.

Every process that a run starts inherits PRONGHORN_RUN=<run id>. Ray's agents and the Redis server write their titles
over their environment, so a process without any is ours if it keeps a file open (or stands) in the run's temporary
folder. One that has an environment and not that variable is somebody else's, whatever it looks at there. A zombie is
nobody's: it has ended. Nothing here looks at a process by its name.
"""

import signal
import time
from pathlib import Path

import psutil

RUN_VARIABLE = "PRONGHORN_RUN"
TERMINATE_GRACE_S = 3.0
KILL_GRACE_S = 5.0


def of_run(run_id: str, temp_dir: Path | None) -> list[psutil.Process]:
    """The living processes of that run, whoever their parents are; never the caller's own."""
    own_pid = psutil.Process().pid
    own_uid = psutil.Process().uids().real
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == own_pid or process.uids().real != own_uid or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if belongs(process, run_id, temp_dir):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def belongs(process: psutil.Process, run_id: str, temp_dir: Path | None) -> bool:
    """Raises psutil.NoSuchProcess where it has ended."""
    try:
        environ = process.environ()
    except (psutil.AccessDenied, OSError):
        environ = {}
    if environ:
        return environ.get(RUN_VARIABLE) == run_id
    return temp_dir is not None and _lives_in(process, temp_dir)


def _lives_in(process: psutil.Process, folder: Path) -> bool:
    prefix = f"{folder}/"
    try:
        return any(file.path.startswith(prefix) for file in process.open_files()) or process.cwd().startswith(prefix)
    except (psutil.AccessDenied, OSError):
        return False


def end(processes: list[psutil.Process], grace_s: float = TERMINATE_GRACE_S) -> list[psutil.Process]:
    """SIGTERM, then SIGKILL after `grace_s`; returns those that live on even so."""
    for process in processes:
        _signal(process, signal.SIGTERM)
    alive = _wait(processes, grace_s)
    for process in alive:
        # A stopped process takes no SIGTERM, and none but SIGKILL ends it.
        _signal(process, signal.SIGKILL)
    return _wait(alive, KILL_GRACE_S)


def end_run(run_id: str, temp_dir: Path | None, grace_s: float = TERMINATE_GRACE_S) -> list[psutil.Process]:
    """End every process of the run, those started meanwhile included; returns those that live on even so."""
    for _ in range(3):
        processes = of_run(run_id, temp_dir)
        if not processes:
            break
        end(processes, grace_s)
    return of_run(run_id, temp_dir)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def _wait(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that are alive after `timeout_s`; returns as soon as none is. Zombies of other parents count as ended."""
    give_up_s = time.monotonic() + timeout_s
    while True:
        alive = [process for process in processes if _is_alive(process)]
        if not alive or time.monotonic() >= give_up_s:
            return alive
        psutil.wait_procs(alive, timeout=0.05)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def listening(run_id: str, temp_dir: Path | None) -> list[tuple[str, str]]:
    """(address, process title) of every TCP port on which the run's processes listen, sorted by title."""
    found = set()
    for process in of_run(run_id, temp_dir):
        try:
            title = _title(process)
            for connection in process.net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr:
                    found.add((title, f"{connection.laddr.ip}:{connection.laddr.port}"))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return [(address, title) for title, address in sorted(found)]


def words_of(process: psutil.Process) -> list[str]:
    """Its command line, which may be a title that it wrote itself; empty where it has ended."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []


def _title(process: psutil.Process) -> str:
    words = process.cmdline() or [process.name()]
    if "-m" in words[:4]:
        return " ".join(words[words.index("-m") + 1 :][:1])
    script = next((word for word in words[1:3] if word.endswith(".py")), words[0])
    return Path(script).name if "/" in script else " ".join(words)[:60].strip()
