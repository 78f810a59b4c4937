"""What an index claims, held against the files, before memory is taken for it.

An altered ``.metadata`` may speak of tensors of any size. Memory for them would be asked for before
the first byte is read, and a machine that hands it out ends the process later.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from air_lightning.checkpoint.location import refuse_link_out
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
    places: dict[str, set[tuple[int, int]]] = defaultdict(set)
    stored: Counter[str] = Counter()
    transformed: set[str] = set()
    for index, info in metadata.storage_data.items():
        places[info.relative_path].add((info.offset, info.length))
        stored[index.fqn] += info.length
        if getattr(info, "transform_descriptors", None):
            transformed.add(index.fqn)  # perhaps compressed
    held = sum(_held(storage, name, sorted(items)) for name, items in places.items())
    claimed = 0
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata) and key not in transformed:
            claimed += _claimed(storage, key, entry, min(stored[key], held))
    if claimed > held:
        raise CorruptCheckpointError(
            f"{storage.root}/{METADATA} speaks of tensors of {claimed} bytes in all, and {held} "
            f"are stored. {_REMEDY}"
        )


def claimed_bytes(metadata: Metadata, keys: Iterable[str]) -> int:
    """Return how many bytes the tensors among these entries have."""
    entries = (metadata.state_dict_metadata[key] for key in keys)
    return sum(_nbytes(entry) for entry in entries if isinstance(entry, TensorStorageMetadata))


def _nbytes(entry: TensorStorageMetadata) -> int:
    nbytes: int = entry.properties.dtype.itemsize
    for length in entry.size:
        nbytes *= length
    return nbytes


def _held(storage: Storage, name: str, items: list[tuple[int, int]]) -> int:
    """Return the bytes of a file's items, none counted twice."""
    refuse_link_out(storage.root, name)
    try:
        size = storage.stat(name).size
    except OSError as error:
        if not is_missing(error):
            raise
        size = 0
    end = 0
    for offset, length in items:
        if offset < end and length:
            raise CorruptCheckpointError(
                f"{storage.root}/{METADATA} speaks of items that overlap in {name} at {offset}. "
                f"{_REMEDY}"
            )
        end = max(end, offset + length)
    if size < end:
        raise CorruptCheckpointError(
            f"{storage.root}/{METADATA} speaks of {end} bytes of {name}, which has {size}. "
            f"{_REMEDY}"
        )
    return sum(length for _, length in items)


def _claimed(storage: Storage, key: str, entry: TensorStorageMetadata, stored: int) -> int:
    wanted = _nbytes(entry)
    if wanted > stored:
        raise CorruptCheckpointError(
            f"{storage.root}/{METADATA} gives {key} the shape {tuple(entry.size)}, which is "
            f"{wanted} bytes, and {stored} are stored. {_REMEDY}"
        )
    return wanted
