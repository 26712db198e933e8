"""Task ownership: the only place in the tree that creates an asyncio task.

An `Owner` has a name, its tasks have names, the first task that fails ends the owner with its exception, and `stop`
ends in bounded time, saying who would not.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)


class Owner:
    """Starts tasks, watches them, and ends them.

    `on_failure` is called once, with the name and the exception, for the first task that raised anything but
    CancelledError; the owner's other tasks go on until `stop`, so that the caller can end things in order.
    """

    def __init__(self, name: str, on_failure: Callable[[str, BaseException], None] | None = None) -> None:
        self.name = name
        self.failure: BaseException | None = None
        self._on_failure = on_failure
        self._tasks: dict[asyncio.Task[Any], None] = {}  # a dict for its order: tasks end in that of their start
        self._stopped = False

    def start(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run `coroutine` as a task of this owner. Raises RuntimeError once the owner has been stopped."""
        if self._stopped:
            coroutine.close()
            raise RuntimeError(f"{self.name} is stopped; it cannot start {name}")
        task = asyncio.create_task(coroutine, name=f"{self.name}/{name}")
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("task %s failed", task.get_name(), exc_info=error)
        if self.failure is None:
            self.failure = error
            if self._on_failure is not None:
                self._on_failure(task.get_name(), error)

    @property
    def running(self) -> list[str]:
        return sorted(task.get_name() for task in self._tasks)

    async def stop(self, grace_s: float) -> None:
        """Cancel every task and wait for them, at most `grace_s`; what is left then is named in the log."""
        self._stopped = True
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            _, pending = await asyncio.wait(tasks, timeout=grace_s)
            for task in pending:
                log.error("task %s did not end within %.1f s", task.get_name(), grace_s)
