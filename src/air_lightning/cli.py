"""``air-lightning``: checkpoints listed, checked, pruned, exported; file lists; the machine.

Tables for people, ``--json`` for programs. Exit codes: 0 yes or done, 1 no (none found, not
sound), 2 wrong usage or argument, 3 storage cannot be reached. Only ``export``,
``inspect`` and some of ``verify --deep`` load torch, so the others start in a fraction of a second.
A reader that closes the pipe early (``| head``) changes neither the exit code nor prints an error.
"""

import argparse
import io
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from air_lightning import __version__
from air_lightning.checkpoint import catalog
from air_lightning.checkpoint.catalog import CheckpointRecord
from air_lightning.errors import AirError, CheckpointError, EmptyVolumeError, InvalidArgumentError

DONE, NO, USAGE, UNREACHABLE = 0, 1, 2, 3
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: As after the program's name; those of the process when None.

    Returns:
        The exit code.
    """
    options = _parser().parse_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    # Printed at the end: a BrokenPipeError on the way is then one of storage, not of the reader.
    with redirect_stdout(io.StringIO()) as printed:
        code = _run(options)
    _print_all(printed.getvalue())
    return code


def _run(options: argparse.Namespace) -> int:
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except InvalidArgumentError as error:
        if isinstance(error.__cause__, ImportError):
            return _fail(f"{error}{_extra(str(error))}", UNREACHABLE)
        return _fail(error, USAGE)
    except (CheckpointError, EmptyVolumeError) as error:
        return _fail(error, NO)
    except (OSError, AirError) as error:
        return _fail(error, UNREACHABLE)


def _extra(message: str) -> str:
    s3 = message.lower().startswith(("s3://", "s3a://"))
    return " For s3:// there is an extra: pip install 'air-lightning[s3]'." if s3 else ""


def _print_all(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # What is left in the buffer goes nowhere: at exit Python flushes once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="air-lightning",
        description="Look at, check, prune and export checkpoints on volumes; keep file lists.",
        epilog="exit codes: 0 yes or done, 1 no, 2 wrong usage, 3 storage cannot be reached",
    )
    parser.add_argument("--version", action="version", version=f"air-lightning {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _command(commands, "ls", _ls, "ROOT", "list the checkpoints in a directory, newest first")
    _command(commands, "latest", _latest, "ROOT", "print the newest sound checkpoint's path")
    verify = _command(commands, "verify", _verify, "PATH", "say whether a checkpoint is sound")
    verify.add_argument("--deep", action="store_true", help="read all of it, compare checksums")
    _command(commands, "inspect", _inspect, "PATH", "show what a checkpoint holds")
    prune = _command(commands, "prune", _prune, "ROOT", "delete old and torn checkpoints")
    prune.add_argument("--keep-last", type=int, required=True, metavar="N", help="newest to keep")
    prune.add_argument(
        "--keep-every", type=int, metavar="K", help="also keep those whose step K divides"
    )
    prune.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    manifest = _command(commands, "manifest", _manifest, "PATH", "keep a directory's file list")
    manifest.add_argument("out", metavar="OUT", help="the file to write")
    manifest.add_argument("--pattern", metavar="GLOB", help="only files that match, as '*.png'")
    export = _command(commands, "export", _export, "PATH", "write a checkpoint as one file")
    export.add_argument("out", metavar="OUT", help="FILE.ckpt, or FILE.safetensors for weights")
    export.add_argument("--force", action="store_true", help="replace OUT if it is there")
    doctor = _command(commands, "doctor", _doctor, "PATH", "say what this machine offers", many="*")
    doctor.add_argument("--write", action="store_true", help="try to write below each PATH, too")
    return parser


def _command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    place: str,
    text: str,
    *,
    many: str | None = None,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.add_argument(
        "path", metavar=place, nargs=many, help="volume path, URL or local directory"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(command=run)
    return parser


def _ls(options: argparse.Namespace) -> int:
    records = catalog.list_checkpoints(options.path)
    _print_records(records, options.json, empty=f"No checkpoints in {options.path}.")
    return DONE


def _latest(options: argparse.Namespace) -> int:
    path = catalog.find_latest_valid(options.path)
    if options.json:
        print(json.dumps({"path": path}))
    elif path is not None:
        print(path)
    else:
        print(f"No complete checkpoint in {options.path}.", file=sys.stderr)
    return NO if path is None else DONE


def _verify(options: argparse.Namespace) -> int:
    try:
        record = catalog.verify_checkpoint(options.path, deep=options.deep)
    except CheckpointError as error:
        if options.json:
            print(json.dumps({"path": options.path, "valid": False, "reason": str(error)}))
        raise
    if options.json:
        print(json.dumps(asdict(record)))
    else:
        what = "checksums" if options.deep else "sizes (--deep for checksums)"
        print(f"Sound: {record.path}, {_bytes(record.size)}, by its {what}.")
    return DONE


def _prune(options: argparse.Namespace) -> int:
    removed = catalog.prune_checkpoints(
        options.path,
        keep_last=options.keep_last,
        keep_every=options.keep_every,
        dry_run=options.dry_run,
    )
    if not options.json and removed:
        print("Would delete:" if options.dry_run else "Deleted:")
    _print_records(removed, options.json, empty="Nothing to delete.")
    gone = {record.path for record in removed}
    for record in catalog.list_checkpoints(options.path):
        if not record.valid and record.path not in gone:
            print(
                f"Kept {record.path}: {record.reason}. No complete checkpoint is known to be "
                "newer, so a run may still be writing it; if none is, delete it by hand.",
                file=sys.stderr,
            )
    return DONE


def _manifest(options: argparse.Namespace) -> int:
    from air_lightning.data.manifest import write_manifest

    count = write_manifest(options.path, options.out, pattern=options.pattern)
    if options.json:
        print(json.dumps({"path": options.path, "manifest": options.out, "count": count}))
    else:
        print(f"Wrote {options.out}: {count} files.")
    return DONE


def _inspect(options: argparse.Namespace) -> int:
    from air_lightning.checkpoint.inspection import inspect_checkpoint

    found = inspect_checkpoint(options.path)
    if options.json:
        print(json.dumps(found))
        return DONE
    summary = {key: value for key, value in found.items() if key not in ("entries", "versions")}
    summary |= {"time": _time(found["time"]), "size": _bytes(found["size"])}
    summary |= {f"version of {name}": value for name, value in found["versions"].items()}
    for key, value in summary.items():
        label = "time (UTC)" if key == "time" else key.replace("_", " ")
        print(f"{label}: {'-' if value is None else value}")
    rows = [
        (entry["name"], entry["kind"], _shape(entry["shape"]), _bytes(entry["size"]))
        for entry in found["entries"]
    ]
    _print_table(("ENTRY", "KIND", "SHAPE", "STORED"), rows)
    return DONE


def _export(options: argparse.Namespace) -> int:
    from air_lightning.checkpoint.export import export_checkpoint

    path = export_checkpoint(options.path, options.out, overwrite=options.force)
    print(json.dumps({"path": path}) if options.json else f"Exported to {path}.")
    return DONE


def _doctor(options: argparse.Namespace) -> int:
    from air_lightning import doctor

    checks = doctor.examine_machine()
    for path in options.path:
        checks += doctor.examine_place(path, write=options.write)
    if options.json:
        print(json.dumps([asdict(check) for check in checks]))
    else:
        rows = [(check.status, check.name, check.found) for check in checks]
        _print_table(("", "CHECK", "FOUND"), rows)
        for check in checks:
            if check.remedy:
                print(f"{check.status}: {check.name}: {check.remedy}")
    return NO if any(check.status == doctor.FAIL for check in checks) else DONE


def _print_records(records: list[CheckpointRecord], as_json: bool, *, empty: str) -> None:
    if as_json:
        print(json.dumps([asdict(record) for record in records]))
        return
    if not records:
        print(empty, file=sys.stderr)
        return
    rows = [
        (
            "-" if record.step is None else str(record.step),
            _time(record.time),
            _bytes(record.size),
            "yes" if record.valid else f"no: {record.reason}",
            record.path,
        )
        for record in records
    ]
    _print_table(("STEP", "TIME (UTC)", "SIZE", "SOUND", "PATH"), rows)


def _print_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())


def _shape(sizes: Sequence[int] | None) -> str:
    return "-" if sizes is None else "x".join(map(str, sizes)) or "scalar"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return datetime.fromtimestamp(seconds, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def _bytes(count: float) -> str:
    for unit in _UNITS[:-1]:
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_UNITS[-1]}"


def _fail(error: Exception | str, code: int) -> int:
    print(f"air-lightning: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
