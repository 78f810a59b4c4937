"""One asynchronous save in flight: staging on the caller's thread, everything else behind it.

``save`` waits for the save before it (and raises its error), agrees with the other ranks on who
writes what, copies this rank's part of the state, and starts a thread that runs the DCP save on a
process group of our own. Every rank's thread takes part in every save, also where its own staging
or writer failed: the failure is then raised on every rank, and the others are not left to wait.

What must follow a publication (deleting the checkpoint that it replaces) is queued by
``after_published`` and dropped if the save failed: the older checkpoint is then the good one.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.storage import StorageWriter

from air_lightning.checkpoint.blobs import nbytes
from air_lightning.checkpoint.ending import wait_at_exit
from air_lightning.checkpoint.following import Following
from air_lightning.checkpoint.moving import is_helped
from air_lightning.checkpoint.planner import FailedWriter, first_failure
from air_lightning.checkpoint.planner import save as save_entries
from air_lightning.checkpoint.sharing import own_share
from air_lightning.checkpoint.staging import Stager
from air_lightning.checkpoint.suspended import no_collections
from air_lightning.checkpoint.turn import Flag, Turn
from air_lightning.errors import InvalidArgumentError, SaveFailedError
from air_lightning.volumes.threads import start_thread

_log = logging.getLogger("air_lightning")

# How much later the background begins, unless it is waited for. Its Python would take the
# interpreter's lock from the caller, for 5 ms (sys.getswitchinterval) whenever that lets go of it
# on its way back to the training.
_HEAD_START_S = 0.02


@dataclass
class SaveStats:
    """What one save took.

    Attributes:
        stall_s: Seconds that the caller was blocked, waiting for the save before included.
        stage_s: Of these, seconds of sharing it out over the ranks and copying it.
        write_s: Seconds in the background until published or failed; 0.0 until then.
        bytes: Size of what this rank writes.
        published: Whether the checkpoint is complete.
    """

    stall_s: float
    stage_s: float
    write_s: float
    bytes: int
    published: bool = False


class AsyncSaver:
    """Saves flat entries in the background, one save at a time.

    Args:
        process_group: Our own gloo group of all ranks; nothing else may use it. None with
            ``no_dist``.
        no_dist: This process saves alone.
        timeout_s: Seconds that waiting for a save may take, also at interpreter exit.

    Raises:
        InvalidArgumentError: Ranks are to save together without a group of their own.
    """

    def __init__(
        self,
        *,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool,
        timeout_s: float = 1800.0,
    ) -> None:
        if process_group is None and not no_dist:
            raise InvalidArgumentError(
                "process_group=None was given with no_dist=False. A gloo group of its own is "
                "wanted (torch.distributed.new_group(backend='gloo')): on the default group the "
                "background's collectives would meet those of the training, and deadlock."
            )
        self.stats: list[SaveStats] = []
        self._process_group = process_group
        self._no_dist = no_dist
        self._timeout_s = timeout_s
        self._stager = Stager()
        self._preparing: threading.Thread | None = None
        self._pid = os.getpid()
        self._turn = Turn()
        self._idle = Flag(is_set=True)
        self._awaited = Flag(is_set=False)
        self._failed: list[SaveFailedError] = []  # the last one's error, until it is raised
        self._target = ""
        self._started = 0.0
        self._following = Following(is_over=True)
        wait_at_exit(self, lambda saver: saver.close())

    def save(
        self,
        entries: Mapping[str, Any],
        make_writer: Callable[[], StorageWriter],
        *,
        on_published: Callable[[], None] | None = None,
        unshared: Collection[str] = (),
        unsure: Collection[str] = (),
    ) -> None:
        """Stage ``entries`` and start saving them; every rank calls this for every save.

        Args:
            entries: What ``state.to_entries`` returned; may be changed once this returns.
            make_writer: Called in the background; its errors fail the save on every rank.
            on_published: Called in the background once the checkpoint is complete.
            unshared: Keys that no other rank has.
            unsure: Keys whose values may differ between ranks; then rank 0's is saved.

        Raises:
            SaveFailedError: The save before this one failed, or still runs after the timeout; or
                this thread is in a call of this already.
        """
        begun = time.perf_counter()
        self.wait()
        with self._turn():
            self.wait()  # for what a signal handler or another thread began meanwhile
            waited = time.perf_counter()
            with no_collections():
                staged, failure, size = self._stage(entries, unshared, unsure)
            ended = time.perf_counter()
            stats = SaveStats(ended - begun, ended - waited, 0.0, size)
            self.stats.append(stats)
            self._following = Following(on_published)
            self._started = time.monotonic()
            self._target = "the checkpoint"
            self._awaited.clear()
            self._idle.clear()
            # A daemon: exit waits in wait_at_exit, with a bound; joining would have none.
            todo = (staged, make_writer, failure, stats)
            if start_thread(self._run, "air-lightning-save", *todo) is None:
                self._run(*todo)  # the other ranks count on this one's part

    def copies_much(self) -> bool:
        """Whether to look for what can begin early takes less than it saves."""
        return self._stager.nbytes == 0 or is_helped(self._stager.nbytes)

    @contextlib.contextmanager
    def begun(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Let the copy begin before ``save`` has its entries; a save within the block takes it.

        Args:
            tensors: Large ones that will be saved, more or less; nobody may change them meanwhile.
        """
        try:
            with self._turn():
                if not self.in_flight():  # in flight, it reads the buffers
                    self._end_preparing()
                    self._stager.begin(tensors)
            yield
        finally:
            with self._turn():
                self._stager.leave()

    def prepare(self, tensors: Iterable[torch.Tensor]) -> None:
        """Allocate in the background what staging will need: the first save is then fast too.

        Args:
            tensors: What will be saved, more or less; their values do not matter.
        """
        if self._preparing is not None or self.in_flight():
            return
        self._preparing = start_thread(self._reserve, "air-lightning-stage", list(tensors))

    def _reserve(self, tensors: list[torch.Tensor]) -> None:
        try:
            self._stager.reserve(tensors)
        except Exception as error:  # noqa: BLE001 - the first save tries again, and raises
            _log.warning("Memory for staging could not be allocated ahead of a save: %s", error)

    def _end_preparing(self) -> None:
        if self._preparing is not None:
            self._preparing.join()

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the save in flight is published.

        Args:
            timeout_s: At most so many seconds; the constructor's by default.

        Raises:
            SaveFailedError: It failed (raised once, from its cause), or it still runs.
        """
        limit = self._timeout_s if timeout_s is None else timeout_s
        if not self._settled(limit):
            raise SaveFailedError(
                f"The save of {self._target} has been running for "
                f"{time.monotonic() - self._started:.0f} s and is not published; waiting stopped "
                f"after {limit:g} s. Check that every rank is alive and that the storage answers, "
                "or raise timeout_s."
            )
        with contextlib.suppress(IndexError):  # no lock: a signal handler may be here once more
            raise self._failed.pop()

    def after_published(self, action: Callable[[], None]) -> None:
        """Run ``action`` after the save in flight, or now if there is none.

        It is dropped, with a line in the log, if that save fails. Its own errors are logged.

        Args:
            action: Called in the background, or right here.
        """
        self._following.add(action, has_failed=lambda: bool(self._failed))

    def in_flight(self) -> bool:
        """Whether a save is running in the background."""
        return not self._settled(0.0)

    def settle(self) -> None:
        """Wait for the save in flight, bounded; its error stays for the next ``wait`` to raise."""
        if not self._settled(self._timeout_s):
            _log.error("The save of %s still runs after %g s.", self._target, self._timeout_s)

    def close(self) -> None:
        """Wait for the save in flight, bounded, and raise nothing: an error is logged.

        Use ``wait`` where an error is to be raised. This is for cleaning up after another error,
        which it must not mask.
        """
        try:
            self.wait()
        except SaveFailedError as error:
            _log.error("%s", error, exc_info=error)

    def _settled(self, timeout_s: float) -> bool:
        if timeout_s:
            self._awaited.set()
        # A forked child has no such thread, and would wait for ever.
        return os.getpid() != self._pid or self._idle.wait(timeout_s)

    def _stage(
        self, entries: Mapping[str, Any], unshared: Collection[str], unsure: Collection[str]
    ) -> tuple[dict[str, Any], BaseException | None, int]:
        try:
            if not self._no_dist:
                # No save is in flight: the group is ours, on this thread.
                group = self._process_group
                entries = own_share(entries, group, unshared=unshared, unsure=unsure)
            self._end_preparing()
            size = nbytes(entries)  # first: what was begun goes on meanwhile
            return self._stager.stage(entries), None, size
        except Exception as error:  # noqa: BLE001 - raised on every rank, through the collectives
            return {}, error, 0

    def _run(
        self,
        staged: dict[str, Any],
        make_writer: Callable[[], StorageWriter],
        failure: BaseException | None,
        stats: SaveStats,
    ) -> None:
        begun = time.perf_counter()
        self._awaited.wait(_HEAD_START_S)
        error: SaveFailedError | None = None
        try:
            self._write(staged, self._writer(make_writer, failure))
            stats.published = True
        except BaseException as cause:  # noqa: BLE001 - CheckpointException is no Exception
            error = self._explain(cause)
            error.__cause__ = cause
        stats.write_s = time.perf_counter() - begun
        staged.clear()
        # First: whoever finds the save over, and no failure, deletes what it was to replace.
        self._failed = [] if error is None else [error]
        self._following.end(failed=error is not None, target=self._target)
        self._idle.set()

    def _write(self, staged: dict[str, Any], writer: StorageWriter) -> None:
        save_entries(staged, writer, process_group=self._process_group, no_dist=self._no_dist)

    def _writer(
        self, make_writer: Callable[[], StorageWriter], failure: BaseException | None
    ) -> StorageWriter:
        if failure is not None:
            return FailedWriter(failure)
        try:
            writer = make_writer()
        except Exception as error:  # noqa: BLE001 - raised on every rank, through the collectives
            return FailedWriter(error)
        self._target = str(getattr(writer, "checkpoint_id", None) or self._target)
        return writer

    def _explain(self, cause: BaseException) -> SaveFailedError:
        rank, first = 0, cause
        if isinstance(cause, CheckpointException):
            rank, first = first_failure(cause, self._process_group)
        elif not self._no_dist:
            rank = dist.get_rank(self._process_group)
        told = str(first).rstrip(".")
        return SaveFailedError(
            f"Saving {self._target} failed on rank {rank}: {type(first).__name__}: {told}. "
            "It is not a checkpoint; the one before it still is. Free the cause and save again."
        )
