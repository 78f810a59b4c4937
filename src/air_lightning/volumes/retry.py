"""Transient errors: recognised by type and number, retried with back-off, bounded in time, logged.

The one place where foreign errors become ours. Three stay what they are, because callers act on
them: FileNotFoundError, a full disk (ENOSPC, EDQUOT), and errors that are ours already.
"""

import errno
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from air_lightning.errors import AirError, StorageError
from air_lightning.volumes.base import FULL_DISK

_logger = logging.getLogger("air_lightning")
_T = TypeVar("_T")
_jitter = random.SystemRandom()

_TRANSIENT_NUMBERS = frozenset(
    {
        errno.EIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.ENOTCONN,
        errno.EAGAIN,
        errno.EBUSY,  # s3fs translates SlowDown to it
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ENETUNREACH,
        errno.EHOSTUNREACH,
        errno.EREMOTEIO,
    }
)
_TRANSIENT_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_THROTTLING_CODES = frozenset(
    {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "RequestTimeout"}
)
_WARNINGS = 3  # retries of a process that are logged as warnings, whatever their rate
_WARN_EVERY_S = 30.0
# Of clients that we do not import: botocore's and aiohttp's errors that are no OSError.
_TRANSIENT_CLASSES = frozenset(
    {
        *("HTTPClientError", "ConnectionError", "IncompleteReadError", "ResponseStreamingError"),
        *("ClientConnectionError", "ClientPayloadError", "FSTimeoutError"),
    }
)
_NO_CREDENTIALS = frozenset({"NoCredentialsError", "PartialCredentialsError"})
_PERMISSIONS = "Check the permissions of this user, or of the credentials in use, on it."
_REMEDIES = {
    errno.EACCES: _PERMISSIONS,
    errno.EPERM: _PERMISSIONS,
    errno.EROFS: "It is read-only here; use a place that can be written.",
    errno.ENOTDIR: "A part of the path is a file where a directory is wanted.",
    errno.EISDIR: "It is a directory where a file is wanted.",
    errno.ENAMETOOLONG: "Use a shorter name.",
}


@dataclass(frozen=True)
class Retry:
    """How long to try: delays double from ``first_delay_s`` to ``max_delay_s``, with jitter.

    Attributes:
        budget_s: Seconds from the first failure after which the error is final.
        first_delay_s: Upper bound of the first delay.
        max_delay_s: Upper bound of any delay.
        on_retry: Called before each new attempt, in the thread that makes it.
    """

    budget_s: float = 60.0
    first_delay_s: float = 0.1
    max_delay_s: float = 8.0
    on_retry: Callable[[], None] | None = None

    def call(self, operation: str, path: str, action: Callable[[], _T]) -> _T:
        """Call ``action`` until it succeeds, fails for good, or the time is up.

        Args:
            operation: A verb for messages, as "read".
            path: What it is done to, as users see it.
            action: What to do; it must be safe to repeat.

        Raises:
            StorageError: It failed; chained to the last error.
            FileNotFoundError: There is no such file.
            OSError: The disk is full (ENOSPC, EDQUOT).
        """
        failed_at: list[float] = []
        while True:
            try:
                return action()
            except Exception as error:  # noqa: BLE001 - of any client; sorted out below
                failed_at.append(time.monotonic())
                delay = self._delay_after(operation, path, error, failed_at)
            time.sleep(delay)
            if self.on_retry is not None:
                self.on_retry()

    def _delay_after(
        self, operation: str, path: str, error: Exception, failed_at: list[float]
    ) -> float:
        """Seconds until the next attempt; raises where there is none."""
        if is_kept(error):
            raise error
        if not is_transient(error):
            raise translate(operation, path, error) from error
        attempts, elapsed = len(failed_at), failed_at[-1] - failed_at[0]
        bound = min(self.max_delay_s, self.first_delay_s * 2.0 ** min(attempts - 1, 30))
        # Without jitter, ranks that were refused together come back together. It is not drawn from
        # the global generator, which is the training's: its draws would differ by the errors met.
        delay = bound * _jitter.uniform(0.5, 1.0)
        if elapsed + delay > self.budget_s:
            raise _exhausted(operation, path, error, attempts, elapsed) from error
        level, note = _flood.admit()
        _logger.log(
            level,
            "Could not %s %s (attempt %d: %s); trying again in %.1f s%s",
            *(operation, path, attempts, _text(error), delay, note),
        )
        return delay


class _Flood:
    """Which retries of this process are worth a warning: the first, then one in a while.

    At 1 % of errors, dozens of workers would otherwise bury the training's own log.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told = 0
        self._suppressed = 0
        self._told_at = 0.0

    def admit(self) -> tuple[int, str]:
        """The level for one more retry, and what to add to its line."""
        with self._lock:
            now = time.monotonic()
            if self._told >= _WARNINGS and now - self._told_at < _WARN_EVERY_S:
                self._suppressed += 1
                return logging.DEBUG, ""
            suppressed, self._suppressed = self._suppressed, 0
            self._told += 1
            self._told_at = now
            note = f" ({suppressed} more such lines at level DEBUG)" if suppressed else ""
            return logging.WARNING, note


def _reset_flood() -> None:
    global _flood  # noqa: PLW0603 - a fact about the process; a child's parent may hold its lock
    _flood = _Flood()


_flood = _Flood()
os.register_at_fork(after_in_child=_reset_flood)


def is_transient(error: BaseException | None) -> bool:
    """Whether the same call may well succeed a moment later."""
    if error is None or isinstance(error, AirError | FileNotFoundError | PermissionError):
        return False
    if isinstance(error, TimeoutError | ConnectionError):
        return True
    if isinstance(error, OSError) and error.errno in _TRANSIENT_NUMBERS:
        return True
    if _classes(error) & _TRANSIENT_CLASSES and "SSLError" not in _classes(error):
        return True
    return _is_throttling(error) or is_transient(error.__cause__)


def is_kept(error: Exception) -> bool:
    """Whether callers want this error as it is."""
    if isinstance(error, AirError | FileNotFoundError):
        return True
    return isinstance(error, OSError) and error.errno in FULL_DISK


@contextmanager
def naming(operation: str, path: str) -> Iterator[None]:
    """Make errors of a block name ``path``, and not the temporary file or nothing at all.

    Args:
        operation: A verb for messages, as "write".
        path: What it is done to, as users see it.

    Raises:
        StorageError: Instead of an error that no caller acts on.
    """
    try:
        yield
    except OSError as error:
        if not is_kept(error):
            raise translate(operation, path, error) from error
        if not isinstance(error, AirError | FileNotFoundError):
            error.filename = path
        raise


def translate(operation: str, path: str, error: Exception) -> StorageError:
    """The error of ours for a failure that no retry can cure; raise it ``from error``."""
    number = getattr(error, "errno", None)
    if isinstance(error, PermissionError):
        number = number or errno.EACCES  # clients of object stores give it no number
    remedy = _REMEDIES.get(number or 0, "See the error that it was raised from.")
    if _classes(error) & _NO_CREDENTIALS:
        remedy = "Give credentials in storage_options=, or in the environment as the client wants."
    ours = StorageError(f"Could not {operation} {path}: {_text(error)}. {remedy}")
    ours.errno = number
    return ours


def _exhausted(
    operation: str, path: str, error: Exception, attempts: int, seconds: float
) -> StorageError:
    ours = StorageError(
        f"Could not {operation} {path}: {_text(error)}, still so after {attempts} attempts in "
        f"{seconds:.0f} s. Check that the storage answers (is the mount alive, the network up, "
        "the account throttled?), then run again."
    )
    ours.errno = getattr(error, "errno", None)
    return ours


def _classes(error: BaseException) -> set[str]:
    return {of.__name__ for of in type(error).__mro__}


def _is_throttling(error: BaseException) -> bool:
    """Recognise botocore's ClientError, and the HTTP errors of aiohttp, gcsfs and adlfs."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        code = response.get("Error", {}).get("Code")
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return code in _THROTTLING_CODES or status in _TRANSIENT_STATUS
    named = (getattr(error, name, None) for name in ("status", "status_code", "code"))
    return any(isinstance(status, int) and status in _TRANSIENT_STATUS for status in named)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}"
