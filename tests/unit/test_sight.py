"""A checkpoint that all of is there is waited for no longer, whatever is wrong with it."""

from pathlib import Path

import pytest

from air_lightning.checkpoint.manifest import MANIFEST, METADATA, FileRecord, Manifest
from air_lightning.checkpoint.sight import when_seen
from air_lightning.errors import CheckpointMismatchError, CorruptCheckpointError


@pytest.mark.parametrize(
    ("error", "reads"),
    [
        (CorruptCheckpointError("a checksum"), 2),  # what was short may have become whole since
        (CheckpointMismatchError("another model's"), 1),
    ],
)
def test_a_fault_of_a_whole_checkpoint_is_raised_at_once(
    tmp_path: Path, error: Exception, reads: int
) -> None:
    """A read that fails although all files are there is done once more at most, with no wait."""
    (tmp_path / "__0_0.distcp").write_bytes(b"x")
    manifest = Manifest({"__0_0.distcp": FileRecord(1, None)})
    (tmp_path / MANIFEST).write_bytes(manifest.to_bytes())
    (tmp_path / METADATA).write_bytes(b"m")
    calls: list[int] = []

    def read() -> None:
        calls.append(1)
        raise error

    with pytest.raises(type(error)):
        when_seen(read, str(tmp_path), None, bound_s=600)
    assert len(calls) == reads


def test_what_comes_in_sight_is_read(tmp_path: Path) -> None:
    """A checkpoint that is written while it is waited for is read when it is whole."""
    path = tmp_path / "c"

    def read() -> str:
        if path.exists():
            return (path / "__0_0.distcp").read_text()
        path.mkdir()
        (path / "__0_0.distcp").write_text("x")
        (path / METADATA).write_text("m")
        raise FileNotFoundError(path)

    assert when_seen(read, str(path), None, bound_s=0.0) == "x"
