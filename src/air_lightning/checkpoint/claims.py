"""What an index claims, held against the files, before memory is taken for it.

An altered ``.metadata`` may speak of tensors of any size. Memory for them would be asked for before
the first byte is read, and a machine that hands it out ends the process later.
"""

from collections import Counter

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from air_lightning.checkpoint.manifest import METADATA, is_missing
from air_lightning.checkpoint.reader import refuse_foreign_files
from air_lightning.errors import CorruptCheckpointError
from air_lightning.volumes.storage import Storage

_REMEDY = "find_latest_valid(root) names the newest sound checkpoint."


def require_stored(metadata: Metadata, storage: Storage) -> None:
    """Refuse an index whose items do not lie in the files, or whose tensors are not stored.

    Raises:
        UnsafeCheckpointError: It names files outside the directory.
        CorruptCheckpointError: It claims more than there is.
    """
    refuse_foreign_files(metadata, storage.root)
    ends: dict[str, int] = {}
    stored: Counter[str] = Counter()
    transformed: set[str] = set()
    for index, info in metadata.storage_data.items():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        stored[index.fqn] += info.length
        if getattr(info, "transform_descriptors", None):
            transformed.add(index.fqn)  # perhaps compressed
    for name, end in ends.items():
        _require_file(storage, name, end)
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata) and key not in transformed:
            _require_bytes(storage, key, entry, stored[key])


def _require_file(storage: Storage, name: str, end: int) -> None:
    try:
        size = storage.stat(name).size
    except OSError as error:
        if not is_missing(error):
            raise
        size = 0
    if size < end:
        raise CorruptCheckpointError(
            f"{storage.root}/{METADATA} speaks of {end} bytes of {name}, which has {size}. "
            f"{_REMEDY}"
        )


def _require_bytes(storage: Storage, key: str, entry: TensorStorageMetadata, stored: int) -> None:
    wanted = entry.properties.dtype.itemsize
    for length in entry.size:
        wanted *= length
    if wanted > stored:
        raise CorruptCheckpointError(
            f"{storage.root}/{METADATA} gives {key} the shape {tuple(entry.size)}, which is "
            f"{wanted} bytes, and {stored} are stored. {_REMEDY}"
        )
