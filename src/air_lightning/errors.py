"""Every error this package raises on purpose.

The tree, so that a caller can catch as widely or as narrowly as is needed::

    AirError
    ├── InvalidArgumentError (ValueError)      an argument that cannot work, whatever the data
    │   └── InvalidPathError                   neither a volume path nor a URL
    ├── InvalidTypeError (TypeError)           an argument of a kind that cannot work
    ├── VolumeNotMountedError (OSError)        /Volumes is not there, and nothing stands in for it
    ├── StorageError (OSError)                 reading or writing failed, after retries
    │   ├── FileVanishedError                  a listed file is no longer there
    │   └── FileChangedError                   a file's size is not the one that was listed
    ├── EmptyVolumeError (ValueError)          no file to train on
    ├── ManifestError (ValueError)             a file list in a file that cannot be used
    ├── StateError (ValueError)                a state dict that does not fit here
    │   └── GridMismatchError                  taken with other ranks or workers
    ├── RankMismatchError (ValueError)         the ranks were given different data
    ├── WorkerDiedError (RuntimeError)         a loader's worker process was killed
    ├── NotCheckpointableError (TypeError)     no state can be taken of this dataset
    └── CheckpointError
        ├── CorruptCheckpointError             a file is missing, short or altered
        ├── CheckpointMismatchError (ValueError)  a sound checkpoint of something else
        ├── UnsafeCheckpointError              reading it would run code or leave its directory
        └── SaveFailedError                    a save, perhaps in the background, did not complete

A message gives what was given, what was wanted and the remedy, with the values.
"""


class AirError(Exception):
    """Base of all errors raised by this package."""


class InvalidArgumentError(AirError, ValueError):
    """An argument has a value that cannot work."""


class InvalidPathError(InvalidArgumentError):
    """A path is neither a volume path nor an fsspec URL."""


class InvalidTypeError(AirError, TypeError):
    """An argument is an object of a kind that cannot work."""


class VolumeNotMountedError(AirError, OSError):
    """A volume path was given where ``/Volumes`` is not mounted and nothing stands in for it."""


class StorageError(AirError, OSError):
    """Reading from or writing to storage failed, retries included."""


class FileVanishedError(StorageError):
    """A file that was listed is no longer there."""


class FileChangedError(StorageError):
    """A file does not have the size that it was listed with."""


class EmptyVolumeError(AirError, ValueError):
    """There is no file to train on under the path and pattern given."""


class ManifestError(AirError, ValueError):
    """A manifest is missing, altered, of another version, or lists what must not be listed."""


class StateError(AirError, ValueError):
    """A state dict does not fit the object it is loaded into."""


class GridMismatchError(StateError):
    """A state was taken with another number of ranks or workers."""


class RankMismatchError(AirError, ValueError):
    """The ranks of a run have other files, another order or other numbers of batches."""


class WorkerDiedError(AirError, RuntimeError):
    """A worker process of a loader ended in the middle of a pass."""


class NotCheckpointableError(AirError, TypeError):
    """The dataset offers no ``state_dict`` and ``load_state_dict``."""


class CheckpointError(AirError):
    """Base of all errors about checkpoints."""


class CorruptCheckpointError(CheckpointError):
    """A file of the checkpoint is missing, has another size, or other contents."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """The checkpoint is sound but belongs to another model or optimizer."""


class UnsafeCheckpointError(CheckpointError):
    """Reading the checkpoint would run code or leave its directory."""


class SaveFailedError(CheckpointError):
    """A save did not complete; its directory is not a checkpoint."""
