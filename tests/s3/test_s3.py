"""Datasets and checkpoints on a real S3 server, which pages, throttles, cuts and refuses."""

import logging
import os
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from air_lightning import (
    AirError,
    DataLoader,
    UCVolumeDataset,
    UCVolumeReader,
    UCVolumeWriter,
    find_latest_valid,
)
from air_lightning.errors import FileChangedError, FileVanishedError, StorageError
from air_lightning.volumes.retry import Retry
from air_lightning.volumes.storage import open_storage

pytest.importorskip("moto.server", reason="moto is not installed")
boto3 = pytest.importorskip("boto3", reason="boto3 is not installed")
s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
from s3_server import KEY, SECRET, S3Server, s3_server  # noqa: E402 - needs moto

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

BUCKET = "training-bucket"
ROOT = f"s3://{BUCKET}/data"


@pytest.fixture(scope="module")
def running() -> Iterator[S3Server]:
    """One server for all tests."""
    with s3_server() as server:
        yield server


@pytest.fixture
def server(running: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """The server with one empty bucket; no credentials but those that a test gives."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    client(running).mkdir(BUCKET)
    running.heal()
    yield running
    running.heal()
    # Not with s3fs: older ones leave keys that end in a slash, and then the bucket.
    keys = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET}
    store = boto3.resource("s3", endpoint_url=running.url, region_name="us-east-1", **keys)
    store.Bucket(BUCKET).objects.all().delete()
    store.Bucket(BUCKET).delete()


def client(server: S3Server):
    return s3fs.S3FileSystem(**server.options, skip_instance_cache=True)


def content(number: int, size: int = 100) -> bytes:
    return (f"{number:05}." * (size // 6 + 1)).encode()[:size]


def fill(server: S3Server, count: int) -> None:
    files = {f"{BUCKET}/data/part{n % 3}/{n:05}.txt": content(n) for n in range(count)}
    client(server).pipe(files)


def read(path: str) -> tuple[int, bytes]:
    return int(Path(path).stem), Path(path).read_bytes()


def assert_each_once(items: list[tuple[int, bytes]], count: int) -> None:
    assert Counter(number for number, _ in items) == Counter(range(count))
    assert all(data == content(number) for number, data in items)


def test_a_dataset_streams_a_bucket_to_forked_workers(server):
    """Several hundred objects come once each, although the parent used its own client before."""
    fill(server, 300)
    files = UCVolumeDataset(ROOT, storage_options=server.options, shuffle=True)
    number, data = read(next(iter(files)))  # the parent's client has threads and connections now
    assert data == content(number)
    loader = DataLoader(
        UCVolumeDataset(ROOT, storage_options=server.options).map(read),
        batch_size=8,
        num_workers=2,
        collate_fn=list,
    )
    for _ in range(2):
        assert_each_once([item for batch in loader for item in batch], 300)


def test_credentials_and_endpoint_come_from_the_environment_too(server, monkeypatch):
    """The conventions of AWS hold where storage_options= is not given."""
    fill(server, 3)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    assert_each_once([read(path) for path in UCVolumeDataset(ROOT)], 3)


def test_a_listing_has_many_pages_and_no_folder_markers(server):
    """More than a thousand keys are listed; those that consoles write for folders are no files."""
    fill(server, 1100)
    fs = client(server)
    fs.call_s3("put_object", Bucket=BUCKET, Key="data/", Body=b"")
    fs.call_s3("put_object", Bucket=BUCKET, Key="data/empty/", Body=b"")
    storage = open_storage(ROOT, storage_options=server.options)
    server.heal()
    names = [info.name for info in storage.list_files()]
    assert names == sorted(f"part{n % 3}/{n:05}.txt" for n in range(1100))
    assert sum("list-type=2" in request for request in server.requests()) == 2


@pytest.mark.parametrize("size", [0, 1, 1_000_000, 20_000_000])
def test_objects_of_every_size_come_whole(server, tmp_path, size):
    """Large ones by ranges; also where the first answers are cut short without an error."""
    storage = open_storage(ROOT, storage_options=server.options)
    client(server).pipe_file(f"{BUCKET}/data/x", content(7, size))
    server.heal()
    server.shorten(name="data/x", times=2)
    assert storage.download(storage.stat("x"), str(tmp_path / "x")) == size
    assert (tmp_path / "x").read_bytes() == content(7, size)
    ranged = [request for request in server.requests() if request.startswith("GET /train")]
    assert len(ranged) >= (4 if size > 16_000_000 else 1)


@pytest.mark.parametrize("size", [1000, 20_000_000])
def test_objects_that_changed_or_went_are_named(server, tmp_path, size):
    """Of another size: FileChangedError; gone: FileVanishedError; of the same size: as it is."""
    storage, fs = open_storage(ROOT, storage_options=server.options), client(server)
    fs.pipe_file(f"{BUCKET}/data/x", content(7, size))
    info = storage.stat("x")._replace(mtime=1.0)
    fs.pipe_file(f"{BUCKET}/data/x", content(8, size))
    assert storage.download(info, str(tmp_path / "x")) == size
    assert (tmp_path / "x").read_bytes() == content(8, size)
    for other in (size - 1, size + 1):
        fs.pipe_file(f"{BUCKET}/data/x", content(9, other))
        with pytest.raises(FileChangedError, match=f"{size} bytes and {other} came"):
            storage.download(info, str(tmp_path / "x"))
    fs.rm_file(f"{BUCKET}/data/x")
    with pytest.raises(FileVanishedError, match=f"{ROOT}/x was listed"):
        storage.download(info, str(tmp_path / "x"))


def test_throttling_is_waited_out(server, caplog):
    """503 SlowDown, more often than the client itself tries, costs time and a line in the log."""
    fill(server, 20)
    caplog.set_level(logging.DEBUG, logger="air_lightning")
    options = {**server.options, "config_kwargs": {"retries": {"max_attempts": 0}}}
    dataset = UCVolumeDataset(ROOT, storage_options=options, read_ahead=0)
    server.fail(503, "SlowDown", name="00004", times=6)
    server.fail(500, "InternalError", name="00005", times=2)
    assert_each_once([read(path) for path in dataset], 20)
    assert "00004.txt" in caplog.text
    assert "00005.txt" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    ("root", "options", "named"),
    [
        ("s3://no-such-bucket/data", {}, "no-such-bucket"),
        (f"s3://{BUCKET}/nothing-here", {}, "nothing-here"),
        (ROOT, {"key": "AKIAWRONG"}, "credentials"),
        (ROOT, {"key": None, "secret": None}, "credentials"),
    ],
    ids=["bucket", "prefix", "wrong key", "no key"],
)
def test_what_cannot_work_fails_at_once_and_tells_no_secret(server, caplog, root, options, named):
    """A mistyped bucket or key is one error, not tried again, that names it and not the secret."""
    caplog.set_level(logging.DEBUG, logger="air_lightning")
    with pytest.raises((AirError, FileNotFoundError), match=named) as caught:
        UCVolumeDataset(root, storage_options={**server.options, **options})
    assert "trying again" not in caplog.text
    assert len(server.requests()) <= 10
    shown = "".join(traceback.format_exception(caught.value)) + caplog.text
    assert SECRET not in shown


def test_a_mistyped_bucket_is_not_created(server):
    """Writing says that the bucket is missing, and leaves it missing."""
    storage = open_storage("s3://mistyped/checkpoints", storage_options=server.options)
    storage.make_root()
    with pytest.raises(FileNotFoundError, match="s3://mistyped/checkpoints/x"):
        storage.write_bytes("x", b"1")
    assert "mistyped" not in client(server).ls("")


def test_a_server_that_is_down_is_waited_for_within_the_budget(server):
    """No connection is trouble of the moment; the error then says that nobody answers."""
    options = {**server.options, "config_kwargs": {"retries": {"max_attempts": 0}}}
    options["endpoint_url"] = "http://127.0.0.1:9"
    storage = open_storage(ROOT, storage_options=options, retry=Retry(budget_s=0.5))
    with pytest.raises(StorageError, match="attempts.*the network up"):
        storage.read_bytes("x", 0, 1)


def test_checkpoints_are_saved_found_and_loaded(server):
    """What UCVolumeWriter saves to a bucket UCVolumeReader reads; the newest whole one is found."""
    options = server.options
    for step in (1, 2):
        state = {"weight": torch.full((1000,), float(step)), "step": step}
        path = f"s3://{BUCKET}/ckpt/step={step}"
        writer = UCVolumeWriter(path, storage_options=options, global_step=step)
        dcp.save(state, storage_writer=writer)
    found = find_latest_valid(f"s3://{BUCKET}/ckpt", storage_options=options)
    assert found == f"s3://{BUCKET}/ckpt/step=2"
    loaded = {"weight": torch.zeros(1000), "step": 0}
    dcp.load(loaded, storage_reader=UCVolumeReader(found, storage_options=options))
    assert loaded["step"] == 2
    assert torch.equal(loaded["weight"], torch.full((1000,), 2.0))
    client(server).rm_file(f"{found[5:]}/.metadata")
    assert find_latest_valid(f"s3://{BUCKET}/ckpt", storage_options=options) == path[:-1] + "1"


def test_keys_with_an_empty_segment_are_left_out(server, caplog):
    """S3 has keys that go on with a slash: they are no files, one is named, the rest is read."""
    client(server).pipe({f"{BUCKET}/data/{key}": content(1) for key in ("/1", "a//1", "a/1", "1")})
    dataset = UCVolumeDataset(ROOT, storage_options=server.options).map(read)
    assert [number for number, _ in dataset] == [1, 1]
    assert f"{BUCKET}/data//1" in caplog.text
