"""AirDataModule's arguments, each checked before a file is listed.

A Trainer asks for its loaders late, and for those of validation later still: a wrong value that is
found only then has cost the run its start.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_args

from air_lightning.data.checks import check_options
from air_lightning.data.listing import compile_pattern
from air_lightning.data.options import resolve_prefetch, resolve_workers, whole
from air_lightning.data.stream import Uneven
from air_lightning.errors import InvalidArgumentError
from air_lightning.volumes import path as volume_path


class _Rule(NamedTuple):
    wanted: str
    fits: Callable[[Any], bool]


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _choice(*choices: object) -> _Rule:
    return _Rule(f"one of {', '.join(map(repr, choices))}", lambda value: value in choices)


_RULES = {
    "decode": _Rule("a function", lambda value: value is None or callable(value)),
    "batch_size": _Rule("at least 1 sample", lambda value: (whole(value) or 0) >= 1),
    "seed": _Rule("a whole number", lambda value: whole(value) is not None),
    "uneven": _choice(None, *get_args(Uneven)),
    "on_error": _choice("raise", "skip"),
    "cache_dir": _Rule(
        "the path of a local directory",
        lambda value: value is None or bool(isinstance(value, str | os.PathLike) and value),
    ),
    "min_free_bytes": _Rule(
        "a number of bytes, 0 or more", lambda value: value is None or _is_count(value)
    ),
    "timeout": _Rule(
        "a number of seconds, 0 or more",
        lambda value: isinstance(value, int | float) and value >= 0,
    ),
    "storage_options": _Rule("a dict", lambda value: value is None or isinstance(value, dict)),
    **dict.fromkeys(
        ("shuffle", "pin_memory", "drop_last", "elastic"), _Rule("true or false", _is_flag)
    ),
}


def _is_count(value: Any) -> bool:
    number = whole(value)
    return number is not None and number >= 0


def check_paths(given: Mapping[str, str | None]) -> dict[str, str]:
    """The normalized paths, by stage, of those that were given.

    Raises:
        InvalidPathError: One is neither a volume path nor a URL.
        InvalidArgumentError: There is none.
    """
    paths = {
        stage: volume_path.normalize(path) for stage, path in given.items() if path is not None
    }
    if not paths:
        raise InvalidArgumentError(
            "AirDataModule was given no path; give at least one of train=, val=, test= and "
            'predict=, e.g. train="/Volumes/<catalog>/<schema>/<volume>/images".'
        )
    return paths


def check_arguments(given: Mapping[str, Any], paths: Mapping[str, str]) -> None:
    """See that every argument can work.

    Args:
        given: The arguments, by name.
        paths: By stage.

    Raises:
        InvalidArgumentError: One cannot; the message says which, and what is wanted.
    """
    resolve_workers(given["num_workers"])
    resolve_prefetch(given["prefetch_factor"], 1)
    if given["pattern"] is not None:
        compile_pattern(given["pattern"])
    check_options(False, 0, "keep", "raise", given["read_ahead"])
    for name, rule in _RULES.items():
        _check(name, given[name], rule)
    stages = f"a dict of paths of manifests by stage, of {sorted(paths)}"
    _check("manifests", given["manifests"], _Rule(stages, lambda value: _fits(value, paths)))


def _fits(manifests: Any, paths: Mapping[str, str]) -> bool:
    if manifests is None:
        return True
    return isinstance(manifests, dict) and manifests.keys() <= paths.keys()


def _check(name: str, value: object, rule: _Rule) -> None:
    if not rule.fits(value):
        raise InvalidArgumentError(f"{name}={value!r} was given; {rule.wanted} is wanted.")
