"""Opening fsspec's file systems: what a URL and the options say, and errors that say what to do."""

from collections.abc import Mapping
from typing import Any

import fsspec

from air_lightning.errors import InvalidPathError, StorageError


def open_fs(root: str, options: Mapping[str, Any]) -> Any:
    """A file system of its own, whatever fsspec may remember of earlier ones.

    Args:
        root: The normalized URL; some schemes have options in it, as the host of ``ftp://``.
        options: The caller's, which win.

    Raises:
        InvalidPathError: No installed package knows the scheme, or it refuses URL and options.
        StorageError: It does not answer.
    """
    protocol = root.partition("://")[0]
    try:
        told = fsspec.get_filesystem_class(protocol)._get_kwargs_from_urls(root)
        return fsspec.filesystem(protocol, skip_instance_cache=True, **{**told, **options})
    except ImportError as error:
        raise InvalidPathError(
            f"{root} needs a package that is not installed ({error}). Install it, as "
            "pip install s3fs (for s3://), gcsfs (gs://) or adlfs (abfs://)."
        ) from error
    except OSError as error:
        raise StorageError(f"Could not open {root}: {error}. Check storage_options.") from error
    except Exception as error:  # of any package; a missing option is a TypeError
        raise InvalidPathError(
            f"{root} was given, and fsspec refuses {protocol}:// ({error}). Check the scheme and "
            "storage_options, or install the package that provides it."
        ) from error
