"""One cluster's folder on this machine: who runs it, what it is made of, and the lock that tells whether it runs.

    <root>/<cluster name>/    lock  run.json  state.json  token  supervisor.log
    <temporary folder>/       r (Ray)  h (HAProxy)  d (Redis)  t (TMPDIR of every child); short, as socket paths are

The supervisor holds an exclusive `flock` on `lock` for its whole life, so a killed one is told from a living one
without asking pids. Both folders are readable by their owner alone: one holds the Ray token.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
import uuid
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from cluster.config import ClusterConfig
from pronghorn.errors import ConfigurationError

CLAIM_ATTEMPTS = 5
TEMP_PREFIX = "ph-"

Phase = Literal["starting", "ready", "stopping", "failed"]


class Run(msgspec.Struct, frozen=True):
    """What is decided before anything is started."""

    run_id: str
    temp_dir: str
    config: ClusterConfig
    edge: str
    """"haproxy" or "serve"; of a Ray cluster that was joined, "its own"."""


class RunState(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the supervisor says of itself."""

    phase: Phase
    pid: int
    url: str | None = None
    dashboard_url: str | None = None
    ray_address: str | None = None
    redis_url: str | None = None
    serve_is_ours: bool = False
    """Whether Serve on that Ray cluster was started for this run."""
    edge: str | None = None
    error: str | None = None
    models: list[str] = []
    """What it serves, by the names that clients give."""


Record = TypeVar("Record", Run, RunState)


class RunFolder:
    """The folder of the cluster called `name` under `root`; nothing is created before `claim`."""

    def __init__(self, root: Path, name: str) -> None:
        self.root = root
        self.name = name
        self.path = root / name
        self._lock_fd: int | None = None

    @property
    def token_path(self) -> Path:
        return self.path / "token"

    @property
    def log_path(self) -> Path:
        return self.path / "supervisor.log"

    def claim(self) -> int:
        """Become this cluster's supervisor-to-be; returns the lock's descriptor, which keeps it while it is open.

        Raises ConfigurationError where another process is that already, or the folder is not ours.
        """
        for _ in range(CLAIM_ATTEMPTS):
            self._create()
            try:
                fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                continue  # whoever had it is removing it just now
            if not _locked(fd, fcntl.LOCK_EX):
                os.close(fd)
                raise ConfigurationError(
                    f"the cluster {self.name!r} is running already; see `pronghorn status`, or end it with "
                    "`pronghorn down`"
                )
            if self._is_lock(fd):
                self._hold(fd)
                return fd
            os.close(fd)
        raise ConfigurationError(f"{self.path} is being removed; try again in a moment")

    def adopt(self, lock_fd: int) -> None:
        """Take over the lock of the process that started us."""
        self._hold(lock_fd)

    def _is_lock(self, fd: int) -> bool:
        """Whether the file that was locked is still the one that lies there."""
        try:
            return os.path.samestat(os.fstat(fd), (self.path / "lock").stat())
        except FileNotFoundError:
            return False

    def _hold(self, fd: int) -> None:
        self._lock_fd = fd
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)

    def holder_pid(self) -> int | None:
        """The process that holds the lock, or held it last."""
        try:
            return int((self.path / "lock").read_bytes())
        except (OSError, ValueError):
            return None

    def is_supervised(self) -> bool:
        """Whether a living process holds the lock."""
        try:
            fd = os.open(self.path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return not _locked(fd, fcntl.LOCK_SH)
        finally:
            os.close(fd)

    @staticmethod
    def make_temp_dir(base: Path) -> Path:
        """A new folder; `base` must be short, since Unix sockets with long names come to lie in it."""
        return Path(tempfile.mkdtemp(prefix=TEMP_PREFIX, dir=base))

    def write(self, record: Run | RunState) -> None:
        """Atomically: a reader sees the old record or the new one."""
        path = self._record_path(type(record))
        scratch = path.with_suffix(f".{uuid.uuid4().hex[:8]}")
        scratch.touch(mode=0o600)
        scratch.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2))
        scratch.replace(path)

    def run(self) -> Run | None:
        return self._read(Run)

    def state(self) -> RunState | None:
        return self._read(RunState)

    def forget(self) -> None:
        """No process is left of the run that the records tell of: its temporary folder and they go."""
        self._remove_temp_dir()
        for kind in (Run, RunState):
            self._record_path(kind).unlink(missing_ok=True)

    def remove(self) -> None:
        """Both folders, whole; for whoever looks on, this one is there or it is not."""
        self._remove_temp_dir()
        leaving = self.root / f".{self.name}.{uuid.uuid4().hex[:8]}"
        with contextlib.suppress(FileNotFoundError):
            self.path.rename(leaving)
        shutil.rmtree(leaving, ignore_errors=True)
        with contextlib.suppress(OSError):  # other clusters have their folders there
            self.root.rmdir()
        self.let_go()

    def let_go(self) -> None:
        """Of the lock; the folder stays as it is."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _remove_temp_dir(self) -> None:
        run = self.run()
        if run is not None and Path(run.temp_dir).name.startswith(TEMP_PREFIX):
            shutil.rmtree(run.temp_dir, ignore_errors=True)

    def _create(self) -> None:
        for folder in (self.root, self.path):
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
                found = folder.lstat()
            except OSError as error:
                raise ConfigurationError(f"{folder} cannot be made: {error.strerror}") from None
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                raise ConfigurationError(f"{folder} exists and is not a folder of this user")
            folder.chmod(0o700)

    def _record_path(self, kind: type[Run] | type[RunState]) -> Path:
        return self.path / ("run.json" if kind is Run else "state.json")

    def _read(self, kind: type[Record]) -> Record | None:
        try:
            return msgspec.json.decode(self._record_path(kind).read_bytes(), type=kind)
        except (OSError, msgspec.DecodeError, msgspec.ValidationError):
            return None


def _locked(fd: int, kind: int) -> bool:
    """Whether the lock was taken; tried again for a moment, because whoever only asks holds it for a moment too."""
    for _ in range(3):
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.02)
    return False


def names(root: Path) -> list[str]:
    """The clusters that have a folder under `root`, running or not."""
    try:
        return sorted(path.name for path in root.iterdir() if (path / "lock").exists() and path.name[0] != ".")
    except OSError:
        return []
