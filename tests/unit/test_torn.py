"""What counts as left by a save that never came to its end."""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from air_lightning import UCVolumeWriter
from air_lightning.checkpoint.attempt import is_torn


def test_what_is_torn(tmp_path: Path) -> None:
    """Only parts of a save are: no file, nothing foreign, and no checkpoint under either name."""
    whole = tmp_path / "whole.ckpt"
    dcp.save({"x": torch.ones(2)}, storage_writer=UCVolumeWriter(whole))
    assert not is_torn(str(whole), None)
    (whole / ".metadata").rename(tmp_path / "marker")
    assert is_torn(str(whole), None)
    (whole / "notes.txt").write_text("mine")
    assert not is_torn(str(whole), None)
    (whole / "notes.txt").unlink()
    (whole / ".__1_0.distcp.77-00c0ffee.tmp").write_bytes(b"half")
    assert is_torn(str(whole), None)
    dcp.save({"x": torch.ones(2)}, storage_writer=UCVolumeWriter(f"{whole}.alt"))
    assert not is_torn(str(whole), None)
    (tmp_path / "file.ckpt").write_bytes(b"Lightning's own")
    assert not is_torn(str(tmp_path / "file.ckpt"), None)
    assert not is_torn(str(tmp_path / "missing.ckpt"), None)
