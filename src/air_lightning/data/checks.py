"""The dataset's arguments: what cannot work is refused at once, not in the middle of an epoch."""

import os
from collections.abc import Mapping
from typing import get_args

from air_lightning.data.ahead import MAX_DEPTH
from air_lightning.data.stream import Uneven
from air_lightning.errors import InvalidArgumentError
from air_lightning.volumes import path as volume_path


def check_options(
    shuffle: object,
    seed: object,
    uneven: object,
    on_error: object,
    read_ahead: object,
) -> None:
    """Refuse a value that cannot work.

    Raises:
        InvalidArgumentError: It gives the option, the value and what is wanted.
    """
    choices = {"shuffle": (False, True), "uneven": get_args(Uneven), "on_error": ("raise", "skip")}
    given = {"shuffle": shuffle, "uneven": uneven, "on_error": on_error}
    for option, wanted in choices.items():
        if given[option] not in wanted:
            names = ", ".join(map(repr, wanted))
            raise InvalidArgumentError(f"{option}={given[option]!r} was given; wanted: {names}.")
    if type(seed) is not int:
        raise InvalidArgumentError(f"seed={seed!r} was given; wanted is an int.")
    if read_ahead is not None and not (type(read_ahead) is int and 0 <= read_ahead <= MAX_DEPTH):
        raise InvalidArgumentError(
            f"read_ahead={read_ahead!r} was given; wanted is a number of files, from 0 for none to "
            f"{MAX_DEPTH}."
        )


def check_storage_options(storage_options: object) -> None:
    """Refuse what is no dict of names; the message does not hold its values."""
    if storage_options is not None and not (
        isinstance(storage_options, Mapping)
        and all(isinstance(key, str) for key in storage_options)
    ):
        # Not its value: it may hold a secret.
        raise InvalidArgumentError(
            f"storage_options of type {type(storage_options).__name__} was given; wanted is a dict "
            'of options of the file system by name, as {"anon": True}.'
        )


def check_cache_dir(cache_dir: object, path: str) -> None:
    """Refuse a cache that would be listed with the files that it caches.

    Raises:
        InvalidArgumentError: It lies in the dataset's directory, and not below a dot-directory.
    """
    directory = volume_path.local_dir(path)
    text = os.fspath(cache_dir) if isinstance(cache_dir, str | os.PathLike) else None
    if directory is None or not isinstance(text, str) or "\0" in text:
        return  # what is no directory at all is refused where it would be made
    cache, listed = os.path.realpath(os.path.expanduser(text)), os.path.realpath(directory)
    below = os.path.relpath(cache, listed).split("/")
    if below[0] == ".." or (below != ["."] and any(part.startswith(".") for part in below)):
        return
    raise InvalidArgumentError(
        f"cache_dir={text!r} was given, which lies in the dataset's own directory "
        f"{path} ({listed}): what is cached would be listed as files to train on. Name a directory "
        "elsewhere on local disk, as /local_disk0/cache."
    )
