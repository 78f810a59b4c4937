"""AirDataModule: datasets and loaders from paths, as a LightningDataModule.

Everything that Lightning asks of a data module is answered from four paths and a few options;
a subclass overrides ``decode`` or one of the ``*_dataset`` methods and keeps the rest.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any, Literal

from lightning.pytorch import LightningDataModule
from typing_extensions import override

from air_lightning.data.dataset import UCVolumeDataset
from air_lightning.data.loader import DataLoader
from air_lightning.data.stream import Uneven, data_rank
from air_lightning.errors import InvalidArgumentError
from air_lightning.integrations.arguments import check_arguments, check_paths


class AirDataModule(LightningDataModule):
    """Builds datasets and loaders for the files below up to four paths.

    The files of a stage are listed once: every loader of the stage has the same list and cache.

    Args:
        train: Path of the training files: a volume path or an fsspec URL.
        val: Path of the validation files.
        test: Path of the test files.
        predict: Path of the files to predict.
        decode: What turns a local path into a sample; a subclass may override ``decode``
            instead. Default: the sample is the path.
        batch_size: Samples per batch and rank.
        shuffle: Whether training files come in an order drawn from ``seed`` and the epoch.
            The other stages keep the order of the list.
        seed: Seed of that order and of the workers' random streams.
        pattern: Glob on the path relative to the stage's path, e.g. ``"*.png"``.
        manifests: By stage, a file that ``air-lightning manifest`` wrote for the stage's path: its
            list is taken, and nothing is listed.
        num_workers: Worker processes per rank and loader; -1 for DataLoader's own default.
        prefetch_factor: Batches that each worker prepares ahead.
        uneven: What happens when the files do not divide evenly among ranks and workers.
            Default: ``"pad"`` under more than one rank, so that no rank waits for ever for a
            batch that another does not have; ``"keep"`` otherwise.
        on_error: ``"raise"`` or ``"skip"`` for a file that cannot be read.
        cache_dir: Directory on a local disk that ranks and restarts of a node share as a cache.
        read_ahead: How many files each worker downloads ahead; None for UCVolumeDataset's default.
        min_free_bytes: Free disk that the cache leaves; None for UCVolumeDataset's default.
        timeout: Seconds that a batch may take before it is an error; 0 for no limit.
        pin_memory: Whether batches are copied to page-locked memory.
        drop_last: Whether a worker's last, smaller batch is left out in training.
        storage_options: Options for fsspec when paths are URLs.
        elastic: Whether training may go on, in the middle of an epoch, with another number of
            ranks or workers than it was saved with: what is left is shared out, each file once.

    Raises:
        InvalidPathError: A path is neither a volume path nor a URL.
        InvalidArgumentError: No path was given, or an option has a value that cannot work.
    """

    def __init__(
        self,
        train: str | None = None,
        val: str | None = None,
        test: str | None = None,
        predict: str | None = None,
        *,
        decode: Callable[[str], Any] | None = None,
        batch_size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        pattern: str | None = None,
        manifests: dict[str, str] | None = None,
        num_workers: int = -1,
        prefetch_factor: int = 4,
        uneven: Uneven | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        cache_dir: str | None = None,
        read_ahead: int | None = None,
        min_free_bytes: int | None = None,
        timeout: float = 0,
        pin_memory: bool = False,
        drop_last: bool = False,
        storage_options: dict[str, Any] | None = None,
        elastic: bool = False,
    ) -> None:
        super().__init__()
        self.paths = check_paths({"train": train, "val": val, "test": test, "predict": predict})
        self._dataset_options: dict[str, Any] = {
            "pattern": pattern,
            "seed": seed,
            "on_error": on_error,
            "cache_dir": cache_dir,
            "read_ahead": read_ahead,
            "min_free_bytes": min_free_bytes,
            "storage_options": storage_options,
        }
        self._loader_options: dict[str, Any] = {
            "num_workers": num_workers,
            "prefetch_factor": prefetch_factor,
            "pin_memory": pin_memory,
            "timeout": timeout,
        }
        others = {
            "decode": decode,
            "batch_size": batch_size,
            "shuffle": shuffle,
            "uneven": uneven,
            "drop_last": drop_last,
            "elastic": elastic,
            "manifests": manifests,
        }
        check_arguments({**self._dataset_options, **self._loader_options, **others}, self.paths)
        # NumPy's whole numbers are taken, too, and states are JSON.
        self.batch_size, self.seed = int(batch_size), int(seed)
        self._dataset_options["seed"] = self.seed
        self.shuffle, self.uneven = shuffle, uneven
        self.drop_last, self.elastic = drop_last, elastic
        self._decode = decode
        self._listed: dict[tuple[Any, ...], UCVolumeDataset] = {}
        self._manifests = dict(manifests or {})

    @override
    def setup(self, stage: str) -> None:
        """See that a fit's validation files are there: Lightning may ask for them epochs later.

        Raises:
            EmptyVolumeError: There is none.
        """
        limit = getattr(self.trainer, "limit_val_batches", 0)
        if stage == "fit" and "val" in self.paths and limit != 0:
            self.val_dataset()

    def decode(self, path: str) -> Any:
        """Turn the local path of a file into a sample; runs in the workers."""
        return path if self._decode is None else self._decode(path)

    def dataset(self, stage: str, *, shuffle: bool = False) -> Any:
        """The decoded dataset of one stage: ``train``, ``val``, ``test`` or ``predict``.

        Raises:
            InvalidArgumentError: That stage was given no path.
            EmptyVolumeError: There is no file below it.
        """
        if stage not in self.paths:
            raise InvalidArgumentError(
                f"The {stage!r} stage was asked for, and AirDataModule was given paths for "
                f"{sorted(self.paths)} only; add {stage}=<path>."
            )
        # Asked here, when the Trainer wants the loader: in __init__ no process group exists.
        _, world_size = data_rank()
        uneven = self.uneven or ("pad" if world_size > 1 else "keep")
        key = (stage, shuffle, uneven)
        if key not in self._listed:
            self._listed[key] = UCVolumeDataset(
                self.paths[stage],
                shuffle=shuffle,
                uneven=uneven,
                manifest=self._manifests.get(stage),
                **self._dataset_options,
            )
        # A copy has a position of its own, and shares list and cache.
        return copy.copy(self._listed[key]).map(self.decode)

    def train_dataset(self) -> Any:
        """The dataset that ``train_dataloader`` wraps."""
        return self.dataset("train", shuffle=self.shuffle)

    def val_dataset(self) -> Any:
        """The dataset that ``val_dataloader`` wraps."""
        return self.dataset("val")

    def test_dataset(self) -> Any:
        """The dataset that ``test_dataloader`` wraps."""
        return self.dataset("test")

    def predict_dataset(self) -> Any:
        """The dataset that ``predict_dataloader`` wraps."""
        return self.dataset("predict")

    @override
    def train_dataloader(self) -> Any:
        """The loader of the training files."""
        dataset = self.train_dataset()
        loader = self._loader(dataset, drop_last=self.drop_last, elastic=self.elastic)
        # Otherwise a rank that runs out of batches leaves the others in a step without end.
        loader.equal_batches = True
        return loader

    @override
    def val_dataloader(self) -> Any:
        """The loader of the validation files; no loader when no path was given."""
        return self._loader(self.val_dataset()) if "val" in self.paths else []

    @override
    def test_dataloader(self) -> Any:
        """The loader of the test files."""
        return self._loader(self.test_dataset())

    @override
    def predict_dataloader(self) -> Any:
        """The loader of the files to predict."""
        return self._loader(self.predict_dataset())

    def _loader(self, dataset: Any, **options: Any) -> Any:
        # Lightning warns of any IterableDataset with a length, since a worker may not know its
        # part of it. Ours do: the loader's length is exact.
        warnings.filterwarnings("ignore", "Your `IterableDataset` has `__len__` defined")
        options = {**self._loader_options, **options}
        return DataLoader(dataset, batch_size=self.batch_size, **options)
