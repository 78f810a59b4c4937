"""Size and time of an open file."""

import os

from air_lightning.volumes.statx import size_and_mtime


def test_it_is_what_fstat_says(tmp_path):
    """To the last bit, also for times before 1970 and sizes beyond 4 GiB."""
    path = tmp_path / "file"
    for size, when_ns in ((0, 0), (5, 1_700_000_000_123_456_789), (5 << 30, -1_500_000_001)):
        with open(path, "wb") as file:
            file.truncate(size)
            os.utime(path, ns=(0, when_ns))
            found = os.fstat(file.fileno())
            assert size_and_mtime(file.fileno()) == (found.st_size, found.st_mtime)
