"""The threads that download one stream's files, in the stream's order.

A task's way: its file enters the stream's budget (budget.py), waits until its batch may be
downloaded (turns.py), and runs. One thread at a time is at this gate: whoever passes it lets the
next one start, while there are files to wait for, 64 at most. So a worker whose turn has not come
has one thread, and takes no processor from those that make the first batch. Threads start in the
process that iterates: they do not survive a fork.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from air_lightning.data.budget import Budget
from air_lightning.data.cache import is_shortage
from air_lightning.data.leases import Lease
from air_lightning.data.turns import Turn
from air_lightning.volumes.threads import NO_THREAD, start_thread

_MAX_THREADS = 64
_JOIN_S = 5.0


class Task:
    """The download of one file.

    Args:
        number: The file's number in the stream.
        batch: The batch that it belongs to.
        size: Its bytes, None where they are not known.

    Attributes:
        future: The lease.
        action: What makes it; calls ``tell`` when it knows the size.
    """

    __slots__ = ("_told", "action", "batch", "future", "number", "size")

    def __init__(self, number: int, batch: int, size: int | None) -> None:
        self.future: Future[Lease] = Future()
        self.action: Callable[[], Lease] | None = None
        self.number = number
        self.batch = batch
        self.size = size
        self._told: list[Callable[[int], None]] = []

    def tell(self, size: int) -> None:
        """Say how large the file is."""
        for told in self._told:
            told(size)

    def run(self, told: list[Callable[[int], None]]) -> None:
        """Download; ``told`` get the size."""
        self._told, action = told, self.action
        assert action is not None, "submitted with its action"
        try:
            lease = action()
        except BaseException as error:  # noqa: BLE001 - it is raised where the file is taken
            self.future.set_exception(error)
        else:
            self.future.set_result(lease)
        self._told, self.action = [], None  # both know the task: no cycle must keep the lease

    def fell_short(self) -> bool:
        """Whether it ended for lack of disk or descriptors."""
        if not self.future.done() or self.future.cancelled():
            return False
        error = self.future.exception()
        return error is not None and is_shortage(error)

    def abandon(self) -> None:
        """Let go of what it has, or will have, downloaded."""
        if self.future.cancel():
            self.action = None
        self.future.add_done_callback(_close_lease)


def _close_lease(future: "Future[Lease]") -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().close()


class Pool:
    """Daemon threads; those of ThreadPoolExecutor would let a hung volume hang the exit.

    Args:
        size: How many threads at most.
        budget: Of the stream's bytes; None for a file out of turn.
        turn: Among the workers of a loader, if there are any.
    """

    def __init__(self, size: int, budget: Budget | None = None, turn: Turn | None = None) -> None:
        self._size = max(1, min(size, _MAX_THREADS))
        self._budget = budget
        self._turn = turn
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._in_order = threading.Lock()
        self._staff = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._free = 0  # threads that are at the gate, or on their way to it
        self._dismissed = False

    def submit(self, task: Task) -> None:
        """Run a task after those that were submitted before."""
        self._tasks.put(task)
        with self._staff:
            self._start_if_needed()

    def dismiss(self) -> None:
        """Let the threads end when their tasks are done."""
        with self._staff:
            self._dismissed = True
        self._tasks.put(None)

    def close(self) -> None:
        """End the threads, if what they are at lets them."""
        if self._budget is not None:
            self._budget.close()
        self.dismiss()
        deadline = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start_if_needed(self) -> None:
        """Let one more thread start, if a task would otherwise wait for a thread alone."""
        enough = self._free or self._dismissed or self._tasks.empty()
        if enough or len(self._threads) == self._size:
            return
        thread = start_thread(self._work, "air-read-ahead")
        if thread is None:
            if not self._threads:
                raise RuntimeError(NO_THREAD)
            return  # those that there are do it
        self._threads.append(thread)
        self._free += 1

    def _work(self) -> None:
        while (passed := self._pass_gate()) is not None:
            with self._staff:
                self._free -= 1
                self._start_if_needed()
            task, size = passed
            del passed
            if task.future.set_running_or_notify_cancel():
                _run(task, size, self._budget, self._turn)
            elif self._budget is not None:
                self._budget.leave(task.number)
            del task  # else it is kept alive, with its lease, until the next one comes
            with self._staff:
                self._free += 1

    def _pass_gate(self) -> tuple[Task, int] | None:
        """The next task, when it may run, and the bytes it is taken to have; None at the end."""
        with self._in_order:  # else a thread that overtakes another would be given its turn
            task = self._tasks.get()
            if task is None:
                self._tasks.put(None)  # for the next thread
                return None
            if self._turn is not None:
                self._turn.announce(task.batch)
            budget, size = self._budget, task.size
            size = size or 0 if budget is None else budget.enter(task.number, size)
            if self._turn is not None:
                self._turn.wait(task.batch, size, task.future.cancelled)
            return task, size


def _run(task: Task, size: int, budget: Budget | None, turn: Turn | None) -> None:
    told: list[Callable[[int], None]] = []
    if budget is not None:
        told.append(lambda size: budget.correct(task.number, size))
    with contextlib.ExitStack() as stack:
        if turn is not None:
            told.append(stack.enter_context(turn.under_way(size)))
        task.run(told)
