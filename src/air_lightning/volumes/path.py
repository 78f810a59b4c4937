"""What a path is: parsed, validated and joined as text, never as ``pathlib`` objects.

``pathlib`` collapses the slashes of ``s3://bucket``, so paths stay ``str``. The path that users
see, log and store is the normalized one; :func:`local_dir` alone says where a volume lies on this
machine.
"""

import os
import re

from air_lightning.errors import InvalidPathError, VolumeNotMountedError

VOLUMES_ROOT_VARIABLE = "AIR_VOLUMES_ROOT"

_VOLUMES = "/Volumes"
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.\-]*)://(?P<rest>.*)", re.DOTALL)
_COLLAPSED_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+:/(?!/)")
_CHAINED_URL = re.compile(
    r"[A-Za-z][A-Za-z0-9+.\-]*::.*://|.*://.*::[A-Za-z][A-Za-z0-9+.\-]*://", re.DOTALL
)
_WANTED = (
    "wanted is a volume path, /Volumes/<catalog>/<schema>/<volume>[/...], or an fsspec URL such as "
    "s3://bucket/key"
)


def normalize(path: str | os.PathLike[str], *, allow_local: bool = False) -> str:
    """Validate a path and return it as users see it.

    Args:
        path: A volume path (also ``dbfs:/Volumes/...``), an fsspec URL or, if ``allow_local``, a
            path on this machine.
        allow_local: Whether local paths are welcome; a relative one is made absolute.

    Returns:
        ``/Volumes/...``, ``scheme://...`` or an absolute local path, without trailing slashes.

    Raises:
        InvalidPathError: It is none of these, has a ``..`` segment or a NUL byte.
    """
    text = _text(path)
    if text.startswith("dbfs:/") and not text.startswith("dbfs://"):
        text = text[len("dbfs:") :]
        if not _is_volumes(text):
            raise InvalidPathError(f"{path!r} was given; {_WANTED} (dbfs: holds only /Volumes).")
    if _CHAINED_URL.match(text):
        raise InvalidPathError(
            f"{path!r} was given, a chain of URLs (::); {_WANTED}. Give the URL of one file "
            'system, and what it lies in as an option: "zip://folder" with '
            'storage_options={"fo": "s3://bucket/archive.zip"}.'
        )
    if match := _URL.fullmatch(text):
        return _url(path, match["scheme"].lower(), match["rest"])
    if _COLLAPSED_URL.match(text):
        raise InvalidPathError(
            f"{path!r} was given, a URL with one slash (pathlib.Path collapses the two); {_WANTED}."
            " Pass URLs as str."
        )
    if _is_volumes(text):
        return _volume(path, text)
    if allow_local:
        return _local(path, text)
    raise InvalidPathError(
        f"{path!r} was given; {_WANTED}. For a directory of this machine say "
        f"{'file://' + os.path.abspath(text)!r}."
    )


def join(root: str, *parts: str) -> str:
    """Append names to a normalized path with one slash between them."""
    head = root[:-1] if root.endswith("/") and not root.endswith("://") else root
    for text in filter(None, (part.strip("/") for part in parts)):
        bare = head.endswith("://") and head != "file://"
        head = f"{head}{text}" if bare else f"{head}/{text}"
    return head or "/"


def name(path: str) -> str:
    """The last segment of a normalized path; empty at a root."""
    return _split(path)[1]


def parent(path: str) -> str:
    """The path one segment up; a root is its own parent."""
    return _split(path)[0]


def local_dir(path: str) -> str | None:
    """Where a normalized path lies on this machine's file system.

    Returns:
        The local path of a volume path, ``file://`` URL or local path; None for other URLs.

    Raises:
        VolumeNotMountedError: A volume path where neither ``/Volumes`` is mounted nor
            ``AIR_VOLUMES_ROOT`` names a directory that stands in for it.
    """
    if _is_volumes(path):
        return _volumes_root(path) + path[len(_VOLUMES) :]
    match = _URL.fullmatch(path)
    if match is None:
        return path
    return (match["rest"] or "/") if match["scheme"] == "file" else None


def _volumes_root(path: str) -> str:
    stand_in = os.environ.get(VOLUMES_ROOT_VARIABLE)
    if stand_in:
        if not os.path.isdir(stand_in):
            raise VolumeNotMountedError(
                f"{path} was asked for, and {VOLUMES_ROOT_VARIABLE}={stand_in} is not a directory. "
                f"Create it, or point {VOLUMES_ROOT_VARIABLE} at the directory that stands in for "
                f"{_VOLUMES}."
            )
        return stand_in.rstrip("/")
    if os.path.isdir(_VOLUMES):
        return _VOLUMES
    raise VolumeNotMountedError(
        f"{path} was asked for, and {_VOLUMES} is not mounted on this machine. Run where Unity "
        f"Catalog volumes are mounted, or set {VOLUMES_ROOT_VARIABLE}=<directory> to a directory "
        f"that stands in for {_VOLUMES}."
    )


def _text(path: str | os.PathLike[str]) -> str:
    try:
        text = os.fspath(path)
    except TypeError:
        text = None
    if not isinstance(text, str):
        raise InvalidPathError(f"{path!r} ({type(path).__name__}) was given as path; {_WANTED}.")
    if not text.strip():
        raise InvalidPathError(f"An empty path ({text!r}) was given; {_WANTED}.")
    if "\0" in text:
        raise InvalidPathError(f"{text!r} was given, which holds a NUL byte; {_WANTED}.")
    return text


def _is_volumes(text: str) -> bool:
    return re.match(r"/+Volumes(/|$)", text) is not None


def _volume(path: object, text: str) -> str:
    segments = [segment for segment in text.split("/") if segment not in ("", ".")]
    _refuse_parents(path, segments)
    if len(segments) < len(("Volumes", "catalog", "schema", "volume")):
        raise InvalidPathError(
            f"{path!r} was given, which names no volume; {_WANTED}: catalog, schema and volume are "
            "needed."
        )
    return "/" + "/".join(segments)


def _url(path: object, scheme: str, rest: str) -> str:
    _refuse_parents(path, rest.split("/"))
    if scheme == "file":
        if not rest.startswith("/"):
            raise InvalidPathError(
                f"{path!r} was given; wanted after file:// is an absolute path: "
                f"{'file:///' + rest!r}?"
            )
        return "file://" + ("/" + rest.strip("/"))
    if not rest.strip("/") and scheme != "memory":
        raise InvalidPathError(f"{path!r} was given, which names no bucket; {_WANTED}.")
    return f"{scheme}://{rest.rstrip('/')}"


def _local(path: object, text: str) -> str:
    absolute = re.sub("^/+", "/", os.path.abspath(os.path.expanduser(text)))
    return _volume(path, absolute) if _is_volumes(absolute) else absolute


def _refuse_parents(path: object, segments: list[str]) -> None:
    if ".." in segments:
        raise InvalidPathError(
            f"{path!r} was given, which has a '..' segment; write the path that is meant in full."
        )


def _split(path: str) -> tuple[str, str]:
    match = _URL.fullmatch(path)
    prefix, rest = (f"{match['scheme']}://", match["rest"]) if match else ("", path)
    head, slash, tail = rest.rstrip("/").rpartition("/")
    if not slash:
        return (prefix, tail) if prefix == "memory://" and tail else (path, "" if prefix else tail)
    return prefix + (head or "/"), tail
