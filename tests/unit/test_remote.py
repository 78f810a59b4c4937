"""Stores behind fsspec that are unlike the others: keys that are no paths, and unknown sizes."""

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import fsspec
import pytest
from fsspec import AbstractFileSystem

from air_lightning.data.dataset import UCVolumeDataset
from air_lightning.errors import InvalidPathError, StorageError
from air_lightning.volumes.remote import FsspecStorage
from air_lightning.volumes.storage import open_storage
from ranks import run_ranks


class Flat(AbstractFileSystem):
    """Keys and their contents, as of an object store."""

    protocol = "flat"
    keys: dict[str, bytes] = {}
    listed_size = told_size = staticmethod(len)

    def find(self, path: str, **options: Any) -> dict[str, Any]:
        below = sorted(key for key in self.keys if key.startswith(f"{path}/"))
        return {key: self._told(key, self.listed_size) for key in below}

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        if path in self.keys:
            return self._told(path, self.told_size)
        if any(key.startswith(f"{path}/") for key in self.keys):
            return {"name": path, "size": None, "type": "directory"}
        raise FileNotFoundError(path)

    def get_file(self, rpath: str, lpath: str, **options: Any) -> None:
        with open(lpath, "wb") as file:
            file.write(self.keys[rpath])

    def _told(self, key: str, size: Any) -> dict[str, Any]:
        return {"name": key, "size": size(self.keys[key]), "type": "file", "mtime": 1.7e9}


@pytest.fixture
def flat(monkeypatch):
    """The store's class, to be given keys."""
    fsspec.register_implementation("flat", Flat, clobber=True)
    return monkeypatch


def contents(url: str) -> list[bytes]:
    def read(path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

    return list(UCVolumeDataset(url).map(read))


def test_keys_with_an_empty_segment_are_left_out_and_told(flat, caplog):
    """They would have the name of another key; one warning names one and counts them."""
    keys = {"b/d//x": b"1", "b/d/a//y": b"2", "b/d/a/y": b"3", "b/d/x": b"4"}
    flat.setattr(Flat, "keys", keys)
    assert contents("flat://b/d") == [b"3", b"4"]
    (told,) = [record.getMessage() for record in caplog.records if "empty" in record.getMessage()]
    assert "Left out 2 keys below flat://b/d" in told
    assert "'b/d//x'" in told


def test_a_size_that_the_listing_does_not_tell_is_asked_for(flat):
    """A listing without sizes is one as of a mount: each file is asked for its own."""
    flat.setattr(Flat, "keys", {"b/x": b"1", "b/y": b"22"})
    flat.setattr(Flat, "listed_size", staticmethod(lambda data: None))
    assert contents("flat://b") == [b"1", b"22"]


def test_a_store_that_tells_no_size_at_all_is_refused(flat):
    """The error names the file and why, and does not take it for an empty one."""
    flat.setattr(Flat, "keys", {"b/x": b"1"})
    flat.setattr(Flat, "listed_size", staticmethod(lambda data: None))
    flat.setattr(Flat, "told_size", staticmethod(lambda data: None))
    with pytest.raises(StorageError, match="flat://b/x has no size: its store tells none"):
        contents("flat://b")
    assert open_storage("flat://b").exists("x")


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("webhdfs:///x", "host"),
        ("github://just-a-name", "org"),
        ("dir://x", "fsspec refuses dir://"),
        ("zip://d::file:///tmp/x.zip", "a chain of URLs"),
        ("simplecache::memory://x", "a chain of URLs"),
        ("filecache::zip://*.csv::s3://bucket/x.zip", "a chain of URLs"),
    ],
)
def test_what_fsspec_cannot_open_is_refused_as_a_path(url, told):
    """Missing options and chained URLs are told as such, whatever fsspec itself would raise."""
    with pytest.raises(InvalidPathError, match=told):
        open_storage(url)


def test_colons_in_a_key_are_no_chain():
    """Only what goes on with another URL is one."""
    assert open_storage("memory://bucket/a::b").root == "memory://bucket/a::b"


class Served(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1")
        self.end_headers()
        self.wfile.write(b"x")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    """A server that has one byte at every path."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Served) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def read_side_by_side(storages: list[FsspecStorage]) -> None:
    sys.setswitchinterval(1e-6)
    for storage in storages:
        together = threading.Barrier(4)

        def first_read(_: int, storage: Any = storage, together: Any = together) -> bytes:
            together.wait()
            return storage.read_bytes("x")

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(first_read, range(4))) == [b"x"] * 4


def test_threads_of_a_forked_worker_may_all_be_first(url, tmp_path):
    """The first reads of a worker, four at once, all go through a client whose loop runs."""
    storages = [FsspecStorage(url) for _ in range(60)]
    assert storages[0].read_bytes("x") == b"x"
    log = tmp_path / "log"
    assert run_ranks(read_side_by_side, storages, log=log) == [0], log.read_text()[-3000:]
