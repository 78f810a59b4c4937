"""``UCVolumeDataset.map``: what a function makes of each path, with the same state."""

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from torch.utils.data import IterableDataset

from air_lightning.data.dataset import UCVolumeDataset
from air_lightning.data.stream import Grid
from air_lightning.errors import InvalidArgumentError

_T = TypeVar("_T")
_U = TypeVar("_U")


class MappedDataset(IterableDataset[_T], Generic[_T]):
    """A dataset of ``fn(local_path)``; made by ``map``, with the state of the dataset beneath.

    Args:
        source: The dataset of paths.
        fn: Called in the process that iterates, while its path is valid.
    """

    def __init__(self, source: UCVolumeDataset, fn: Callable[[str], _T]) -> None:
        if not callable(fn):
            raise InvalidArgumentError(
                f"map({fn!r}) was called; wanted is a function of a local path."
            )
        self.source = source
        self._fn = fn

    @property
    def epoch(self) -> int:
        """The epoch of the pass in progress, or else of the next one."""
        return self.source.epoch

    @property
    def seed(self) -> int:
        """Seed of the shuffle."""
        return self.source.seed

    @property
    def skipped(self) -> int:
        """Bad files replaced so far by this process's stream."""
        return self.source.skipped

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass one of this epoch."""
        self.source.set_epoch(epoch)

    def __len__(self) -> int:
        """Items that this rank delivers in one epoch."""
        return len(self.source)

    def slice_length(self, grid: Grid) -> int:
        """Items that the stream at this place of the grid delivers in one epoch."""
        return self.source.slice_length(grid)

    def file_list_state(self) -> dict[str, Any]:
        """What identifies the file list."""
        return self.source.file_list_state()

    def state_dict(self) -> dict[str, Any]:
        """Where the calling process's stream stands."""
        return self.source.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Begin the next pass where a state dict says."""
        self.source.load_state_dict(state_dict)

    def map(self, fn: Callable[[_T], _U]) -> "MappedDataset[_U]":
        """A dataset of ``fn`` of this one's items."""
        first = self._fn
        return MappedDataset(self.source, lambda path: fn(first(path)))

    def __iter__(self) -> Iterator[_T]:
        return self.source.deliver(self._fn)
