"""A training state through DCP and back is what torch.save and torch.load would have made of it."""

import collections
import io
import logging
import pathlib
import threading

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from air_lightning.checkpoint import blobs, planner
from air_lightning.checkpoint.dcp import UCVolumeReader, UCVolumeWriter
from air_lightning.checkpoint.export import export_checkpoint
from air_lightning.checkpoint.state import (
    optimizer_names,
    read_checkpoint,
    to_entries,
    to_keyed_entries,
)
from air_lightning.errors import (
    CheckpointMismatchError,
    CorruptCheckpointError,
    SaveFailedError,
    UnsafeCheckpointError,
)


def _save(path, checkpoint, names=(), *, rank_blob=None):
    entries = to_entries(checkpoint, optimizer_names=names, rank=0, rank_blob=rank_blob or {})
    planner.save(entries, UCVolumeWriter(str(path)), process_group=None, no_dist=True)
    return entries


def _read(path, *, rank=0, weights_only=True, **options):
    reader = UCVolumeReader(str(path))
    return read_checkpoint(
        reader, rank=rank, weights_only=weights_only, process_group=None, no_dist=True, **options
    )


def _file(checkpoint):
    """What Lightning's own file checkpoint brings back."""
    file = io.BytesIO()
    torch.save(checkpoint, file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=False)


def _assert_equal(got, want, where="checkpoint"):
    assert type(got) is type(want), (where, type(got), type(want))
    if isinstance(want, dict):
        assert list(got) == list(want), where
        assert [type(key) for key in got] == [type(key) for key in want], where
        assert getattr(got, "__dict__", None) == getattr(want, "__dict__", None), where
        for key in want:
            _assert_equal(got[key], want[key], f"{where}[{key!r}]")
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), where
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            _assert_equal(a, b, f"{where}[{i}]")
    elif isinstance(want, torch.Tensor):
        _assert_equal_tensors(got, want, where)
    else:
        assert got == want or got is want or (got != got and want != want), (where, got, want)


def _assert_equal_tensors(got, want, where):
    for attribute in ("dtype", "shape", "layout", "requires_grad", "is_quantized", "is_meta"):
        assert getattr(got, attribute) == getattr(want, attribute), (where, attribute)
    if want.layout != torch.strided:
        return _assert_equal_tensors(got.to_dense(), want.to_dense(), where)
    if want.is_quantized:
        return _assert_equal_tensors(got.dequantize(), want.dequantize(), where)
    if want.is_meta:
        return None
    a, b = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (got, want))
    assert torch.equal(a, b), where
    return None


def _round_trip(tmp_path, checkpoint, names=(), **options):
    """Save and read, and compare with what a file gives; returns the checkpoint read."""
    want = _file(checkpoint)
    _save(tmp_path / "c", checkpoint, names)
    got, _ = _read(tmp_path / "c", **options)
    _assert_equal(got, want)
    return got


class _Net(torch.nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(1, width, 3), torch.nn.BatchNorm2d(width), torch.nn.ReLU()
        )
        self.head = torch.nn.Linear(width, 2)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


def _train(net, optimizer, steps=2):
    for _ in range(steps):

        def closure():
            optimizer.zero_grad()
            loss = net(torch.randn(4, 1, 8, 8)).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def _checkpoint(net, *optimizers):
    return {
        "epoch": 2,
        "global_step": 17,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": net.state_dict(),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"current": {"ready": 3}}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_k_models": {}, "score": None}},
        "optimizer_states": [optimizer.state_dict() for optimizer in optimizers],
        "lr_schedulers": [],
    }


OPTIMIZERS = {
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), amsgrad=True),
    "adamw, two groups": lambda net: torch.optim.AdamW(
        [{"params": net.head.parameters(), "lr": 0.5}, {"params": net.body.parameters()}]
    ),
    "sgd with momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    "sgd, stateless": lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
    "lbfgs": lambda net: torch.optim.LBFGS(net.parameters(), max_iter=3, line_search_fn=None),
    "adagrad": lambda net: torch.optim.Adagrad(net.parameters()),
    "rmsprop": lambda net: torch.optim.RMSprop(net.parameters(), momentum=0.1, centered=True),
    "adafactor": lambda net: torch.optim.Adafactor(net.parameters()),
}


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_bit_for_bit(tmp_path, kind, steps):
    """Model and optimizer restored through DCP take the same next steps as the originals."""
    net = _Net()
    optimizer = OPTIMIZERS[kind](net)
    _train(net, optimizer, steps)
    names = [optimizer_names(net.named_parameters(), optimizer)]
    got = _round_trip(tmp_path, _checkpoint(net, optimizer), names)

    other = _Net()
    other.load_state_dict(got["state_dict"])
    restored = OPTIMIZERS[kind](other)
    restored.load_state_dict(got["optimizer_states"][0])
    for model, its in ((net, optimizer), (other, restored)):
        torch.manual_seed(5)
        _train(model, its, 3)
    _assert_equal(other.state_dict(), net.state_dict())
    _assert_equal(restored.state_dict(), optimizer.state_dict())


def test_moments_are_entries_by_parameter_name(tmp_path):
    """Adam's moments are DCP entries keyed by parameter name; its scalars are in the blob."""
    net = _Net()
    optimizer = torch.optim.AdamW(net.parameters())
    _train(net, optimizer)
    names = [optimizer_names(net.named_parameters(), optimizer)]
    entries = to_entries(
        _checkpoint(net, optimizer), optimizer_names=names, rank=0, rank_blob={"a": 1}
    )
    parameters = [name for name, _ in net.named_parameters()]
    moments = {
        f"optimizer_states.0.state.{name}.{moment}"
        for name in parameters
        for moment in ("exp_avg", "exp_avg_sq")
    }
    model = {f"state_dict.{name}" for name in net.state_dict()}
    assert set(entries) == moments | model | {"air.trainer", "air.rank.0"}


def test_other_ranks_save_what_all_hold_alike_and_their_own_blob():
    """Rank 3 gives its blob, the parameters that are equal on all ranks, and their moments."""
    net = _Net()
    optimizer = torch.optim.AdamW(net.parameters())
    _train(net, optimizer)
    alike = dict(net.named_parameters())
    own = alike.popitem()[0]
    names = [optimizer_names(net.named_parameters(), optimizer)]
    options = {"optimizer_names": names, "rank_blob": {}, "alike": alike}
    zero = to_entries(_checkpoint(net, optimizer), rank=0, **options)
    three = to_entries(_checkpoint(net, optimizer), rank=3, **options)
    assert set(zero) - set(three) == {"air.trainer", "air.rank.0"} | zero.unshared
    assert set(three) - set(zero) == {"air.rank.3"}
    assert not three.unshared
    moments = [f"optimizer_states.0.state.{own}.{name}" for name in ("exp_avg", "exp_avg_sq")]
    buffers = [f"state_dict.{name}" for name, _ in net.named_buffers()]
    assert zero.unshared == {f"state_dict.{own}", *moments, *buffers}


def test_a_default_device_has_no_part_in_it(tmp_path):
    """Under torch.set_default_device a state is saved, read and exported as ever, on the CPU."""
    net = _Net()
    optimizer = torch.optim.AdamW(net.parameters())
    _train(net, optimizer)
    names = [optimizer_names(net.named_parameters(), optimizer)]
    checkpoint = _checkpoint(net, optimizer)
    torch.set_default_device("meta")
    try:
        _save(tmp_path / "c", checkpoint, names)
        got, _ = _read(tmp_path / "c")
        exported = export_checkpoint(tmp_path / "c", tmp_path / "o.ckpt")
    finally:
        torch.set_default_device(None)
    _assert_equal(got, _file(checkpoint))
    _assert_equal(torch.load(exported, weights_only=True)["state_dict"], got["state_dict"])


def test_weights_that_were_exchanged_before_a_save_are_rank_0s():
    """A value that is not the live parameter, as a callback of rank 0 may put, is not shared."""
    net = _Net()
    checkpoint = _checkpoint(net)
    name = next(name for name, _ in net.named_parameters())
    checkpoint["state_dict"][name] = checkpoint["state_dict"][name] * 2
    options = {"optimizer_names": [], "rank_blob": {}, "alike": dict(net.named_parameters())}
    assert f"state_dict.{name}" in to_entries(checkpoint, rank=0, **options).unshared
    assert f"state_dict.{name}" not in to_entries(checkpoint, rank=1, **options)


def test_checkpoint_is_not_changed_by_saving():
    """Turning a checkpoint into entries leaves the caller's dict and tensors as they are."""
    net = _Net()
    optimizer = torch.optim.AdamW(net.parameters())
    _train(net, optimizer)
    checkpoint = _checkpoint(net, optimizer)
    before = _file(checkpoint)
    names = [optimizer_names(net.named_parameters(), optimizer)]
    to_entries(checkpoint, optimizer_names=names, rank=0, rank_blob={})
    _assert_equal(checkpoint, before)


def test_parameters_frozen_or_unused_keep_their_place(tmp_path):
    """A parameter without state and one frozen since come back as they were."""
    net = _Net()
    net.unused = torch.nn.Parameter(torch.randn(3))
    optimizer = torch.optim.AdamW(net.parameters())
    _train(net, optimizer)
    net.head.weight.requires_grad_(False)
    _train(net, optimizer)
    names = [optimizer_names(net.named_parameters(), optimizer)]
    got = _round_trip(tmp_path, _checkpoint(net, optimizer), names)
    assert len(got["optimizer_states"][0]["state"]) == 6


def test_two_optimizers_of_one_model(tmp_path):
    """Each optimizer's integer ids start at 0, and come back to their own parameters."""
    net = _Net()
    first = torch.optim.Adam(net.body.parameters())
    second = torch.optim.SGD(net.head.parameters(), lr=0.1, momentum=0.5)
    for optimizer in (first, second):
        _train(net, optimizer)
    names = [optimizer_names(net.named_parameters(), o) for o in (first, second)]
    _round_trip(tmp_path, _checkpoint(net, first, second), names)


def test_optimizer_of_foreign_parameters_goes_whole_into_the_blob(tmp_path):
    """Where a parameter is none of the module's there are no names, and still no state is lost."""
    net = _Net()
    optimizer = torch.optim.Adam([*net.parameters(), torch.nn.Parameter(torch.randn(2))])
    _train(net, optimizer)
    names = optimizer_names(net.named_parameters(), optimizer)
    assert names is None
    _round_trip(tmp_path, _checkpoint(net, optimizer), [names])


def test_unusual_optimizer_states_survive(tmp_path):
    """State dicts of other shapes, nested state, None, floats, lists and empty dicts come back."""
    deep = {"history": [torch.randn(3), torch.randn(3)], "inner": {"m": torch.randn(2), "n": {}}}
    states = [
        {"state": {}, "param_groups": []},
        {"state": {0: deep, 1: {}, 2: {"a": None, "b": 1.5, "c": float("nan")}}, "more": [1]},
        {"flat": torch.randn(4), "lr": 0.1},
        {"state": {"named": {"m": torch.randn(2)}}, "param_groups": [{"params": ["named"]}]},
        {"state": collections.OrderedDict([(0, torch.randn(2)), (1, {"v": torch.ones(())})])},
        {},
    ]
    names = [{0: "a", 1: "b", 2: "c"}] * len(states)
    _round_trip(tmp_path, {"state_dict": {}, "optimizer_states": states}, names)


def test_dotted_and_colliding_names(tmp_path):
    """Names that give the same DCP key, once joined with dots, do not overwrite each other."""
    states = [{"state": {0: {"b.c": torch.ones(2)}, 1: {"c": torch.zeros(2)}}, "param_groups": []}]
    checkpoint = {
        "state_dict": collections.OrderedDict({"a.b": torch.ones(1), "": torch.ones(3), "a": 1}),
        "optimizer_states": states,
    }
    _round_trip(tmp_path, checkpoint, [{0: "a", 1: "a.b"}])


TENSORS = {
    "bool": torch.tensor([True, False]),
    "uint8": torch.arange(3, dtype=torch.uint8),
    "uint16": torch.tensor([1, 60000], dtype=torch.uint16),
    "int64": torch.arange(4),
    "half": torch.randn(4).half(),
    "bfloat16": torch.randn(3, 3).bfloat16(),
    "float64": torch.randn(2).double(),
    "float8_e4m3fn": torch.randn(5).to(torch.float8_e4m3fn),
    "float8_e5m2": torch.randn(5).to(torch.float8_e5m2),
    "complex64": torch.randn(4, dtype=torch.complex64),
    "complex128": torch.randn(2, 2, dtype=torch.complex128),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0),
    "empty 2d": torch.empty(3, 0, 2),
    "transposed": torch.randn(3, 4).t(),
    "sliced": torch.randn(6, 6)[::2, 1::2],
    "expanded": torch.randn(1, 3).expand(4, 3),
    "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "special": torch.tensor([float("nan"), -float("inf"), -0.0]),
    "parameter": torch.nn.Parameter(torch.randn(2)),
    "frozen parameter": torch.nn.Parameter(torch.randn(2), requires_grad=False),
    "leaf": torch.randn(2, requires_grad=True),
    "sparse": torch.eye(4).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8),
    "meta": torch.empty(2, 3, device="meta"),
}


@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_any_tensor_comes_back(tmp_path, kind):
    """Each dtype and layout, also those that DCP refuses, is equal to what a file gives."""
    tensor = TENSORS[kind] if kind not in ("csr", "quantized") else TENSORS[kind]()
    states = [{"state": {0: {"moment": tensor}}, "param_groups": [{"params": [0]}]}]
    checkpoint = {"state_dict": {"w": tensor, "v": torch.ones(1)}, "optimizer_states": states}
    _round_trip(tmp_path, checkpoint, [{0: "w"}])


def test_memory_format_is_kept(tmp_path):
    """A dense permuted tensor comes back with its strides, as from a file."""
    checkpoint = {"state_dict": {"w": TENSORS["channels_last"], "t": TENSORS["transposed"]}}
    got = _round_trip(tmp_path, checkpoint)["state_dict"]
    assert got["w"].is_contiguous(memory_format=torch.channels_last)
    assert got["t"].stride() == TENSORS["transposed"].stride()


def test_tied_parameters_and_extra_state(tmp_path):
    """A tensor under two names, and what get_extra_state returns, are both there."""

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(3, 3)
            self.b = torch.nn.Linear(3, 3)
            self.b.weight = self.a.weight
            self.extra = {"seen": 3, "scale": torch.randn(2), "none": None}

        def get_extra_state(self):
            return self.extra

        def set_extra_state(self, state):
            self.extra = state

    net = Tied()
    optimizer = torch.optim.Adam(net.parameters())
    net.b(net.a(torch.randn(2, 3))).sum().backward()
    optimizer.step()
    names = [optimizer_names(net.named_parameters(), optimizer)]
    got = _round_trip(tmp_path, _checkpoint(net, optimizer), names)
    other = Tied()
    other.load_state_dict(got["state_dict"])
    assert other.extra["seen"] == 3


def test_paths_and_numpy_values_come_back_under_weights_only(tmp_path):
    """Hyper-parameters that hold paths and NumPy values load without opening the door to code."""
    values = {
        "root": pathlib.Path("/data/x"),
        "windows": pathlib.PureWindowsPath("c:/x"),
        "rate": np.float64(0.1),
        "count": np.int32(7),
        "flag": np.bool_(True),
        "classes": np.arange(3),
        "text": np.array(["a", "bc"]),
    }
    _save(tmp_path / "c", {"state_dict": {}, "hyper_parameters": values})
    got = _read(tmp_path / "c")[0]["hyper_parameters"]
    for key, value in values.items():
        assert type(got[key]) is type(value)
        assert np.array_equal(got[key], value)


def test_object_arrays_are_refused(tmp_path):
    """A NumPy array of objects can hold any pickle, and stays behind weights_only."""
    array = np.array([{"a": threading.Event}], dtype=object)
    _save(tmp_path / "c", {"state_dict": {}, "hyper_parameters": {"a": array}})
    with pytest.raises(UnsafeCheckpointError):
        _read(tmp_path / "c")


class Custom:
    """What a user might keep in a callback's state."""


def test_unsafe_objects_are_reported_at_the_save(tmp_path, caplog):
    """One warning at the save names the class and the remedy; reading is refused, or allowed."""
    blobs._warned.clear()
    checkpoint = {"state_dict": {}, "callbacks": {"mine": Custom()}}
    with caplog.at_level(logging.WARNING, "air_lightning"):
        _save(tmp_path / "c", checkpoint)
        _save(tmp_path / "d", checkpoint)
    warnings = [r.getMessage() for r in caplog.records if "weights_only" in r.getMessage()]
    assert len(warnings) == 1
    assert "Custom" in warnings[0]
    assert "add_safe_globals" in warnings[0]
    assert "air.trainer holds objects (under 'callbacks') that" in warnings[0]
    assert "or fit(..., weights_only=False), which" in warnings[0]
    with pytest.raises(UnsafeCheckpointError, match="Custom"):
        _read(tmp_path / "c", weights_only=None)
    assert isinstance(_read(tmp_path / "c", weights_only=False)[0]["callbacks"]["mine"], Custom)


def test_hyper_parameters_that_do_not_pickle_are_left_out(tmp_path, caplog):
    """As with Lightning's own file: the rest is saved, and a warning says why."""
    kept = {"epoch": 1, "pytorch-lightning_version": "2.6.0", "state_dict": {}}
    _save(tmp_path / "c", {**kept, "hyper_parameters": {"f": lambda: 0}})
    assert _read(tmp_path / "c")[0] == kept
    assert "hyper_parameters" in caplog.text


def _keyed(state, rank_blob=None):
    return to_keyed_entries(state, models=(), optimizers={}, rank=0, rank_blob=rank_blob or {})


def test_no_key_of_a_loops_own_is_left_out(tmp_path, caplog):
    """`hyper_parameters` of a Fabric loop that do not pickle fail the save, as any key's do."""
    state = {"step": 1, "hyper_parameters": {"f": lambda: 0}}
    told = "is under 'hyper_parameters' .* in the state given to fabric.save"
    with pytest.raises(SaveFailedError, match=told):
        raise _keyed(state)["air.trainer"].error
    # Where the plugin was not attached, a loop that calls its weights so is taken for a Trainer.
    with pytest.raises(SaveFailedError, match="is under 'hyper_parameters'"):
        _save(tmp_path / "c", {**state, "state_dict": {}})
    assert not caplog.records


@pytest.mark.parametrize("key", ["air.trainer", "air.rank.0"])
def test_a_loop_is_told_of_unsafe_objects_by_its_own_keys(tmp_path, caplog, key):
    """The warning names the keys, however deep below them the object is, and Fabric's remedy."""
    blobs._warned.clear()
    custom = Custom()
    custom.itself = [custom, {Custom: collections.deque([{3: custom}])}]
    ordered = collections.OrderedDict(a=torch.ones(2, device="meta"), b=(custom,))
    state = {"step": 1, "array": np.ones(2), "config": ordered, "kind": Custom, "more": {1, 2}}
    entries = _keyed(state) if key == "air.trainer" else _keyed({}, state)
    writer = UCVolumeWriter(str(tmp_path / "c"))
    planner.save(entries, writer, process_group=None, no_dist=True)
    (told,) = [r.getMessage() for r in caplog.records if "weights_only" in r.getMessage()]
    where = (
        "The state given to fabric.save" if key == "air.trainer" else "The checkpoint entry " + key
    )
    assert told.startswith(f"{where} holds objects (under 'config', 'kind') that do not load")
    assert "Custom" in told
    assert "fabric.load(..., weights_only=False)" in told
    assert "fit(" not in told


def test_state_that_does_not_pickle_fails_the_save(tmp_path):
    """A lock in a callback's state is an error that says where, raised when the save is planned."""
    told = r"air\.trainer of the checkpoint cannot be pickled: .* is under 'callbacks' \("
    with pytest.raises(SaveFailedError, match=told):
        _save(tmp_path / "c", {"epoch": 1, "callbacks": {"lock": threading.Lock()}})


def test_rank_blobs(tmp_path):
    """A rank gets its own blob back, and None where it did not exist."""
    _save(tmp_path / "c", {"state_dict": {}}, rank_blob={"loader": {"batches": 3}})
    assert _read(tmp_path / "c", rank=0)[1] == {"loader": {"batches": 3}}
    assert _read(tmp_path / "c", rank=1)[1] is None


def test_later_changes_do_not_reach_blobs():
    """Blobs are bytes from the moment of the call."""
    counters = {"n": 1}
    entries = to_entries({"loops": counters}, optimizer_names=[], rank=0, rank_blob=counters)
    counters["n"] = 2
    for key in ("air.trainer", "air.rank.0"):
        content = torch.load(io.BytesIO(entries[key].data), weights_only=True)
        assert content in ({"n": 1},) or content["checkpoint"]["loops"] == {"n": 1}


def test_checkpoint_of_another_model_names_all_differences(tmp_path):
    """Missing and unexpected names, and shapes that differ, are listed before anything is read."""
    _save(tmp_path / "c", {"state_dict": {"a": torch.ones(2, 3), "gone": torch.ones(1)}})
    live = {"a": torch.ones(4, 3), "new": torch.ones(1)}
    with pytest.raises(CheckpointMismatchError) as caught:
        _read(tmp_path / "c", state_dict=live)
    for text in ("missing in the checkpoint: new", "unexpected: gone", "saved 2x3, wanted 4x3"):
        assert text in str(caught.value)
    with pytest.raises(CheckpointMismatchError, match="saved 2x3, wanted 4x3"):
        _read(tmp_path / "c", state_dict=live, strict=False)
    got, _ = _read(tmp_path / "c", state_dict={"a": torch.ones(2, 3)}, strict=False)
    assert got["state_dict"]["a"].shape == (2, 3)


def test_plain_dcp_directory_is_told_apart(tmp_path):
    """A DCP checkpoint of something else is an error that says what is missing."""
    entries = {"weight": torch.ones(2)}
    planner.save(entries, UCVolumeWriter(str(tmp_path / "c")), process_group=None, no_dist=True)
    with pytest.raises(CheckpointMismatchError, match=r"without the entry air\.trainer"):
        _read(tmp_path / "c")


def test_listed_entry_that_is_not_there_is_corruption(tmp_path):
    """A trainer blob that lists a tensor that the metadata lacks is an error naming it."""
    entries = to_entries(
        {"state_dict": {"a": torch.ones(1), "b": torch.ones(1)}},
        optimizer_names=[],
        rank=0,
        rank_blob={},
    )
    del entries["state_dict.b"]
    planner.save(entries, UCVolumeWriter(str(tmp_path / "c")), process_group=None, no_dist=True)
    with pytest.raises(CorruptCheckpointError, match=r"state_dict\.b"):
        _read(tmp_path / "c")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_plain_dcp_tools_read_what_is_saved(tmp_path):
    """dcp.load fills a module's state dict, and dcp_to_torch_save makes a file with it."""
    net, other = _Net(), _Net()
    _save(tmp_path / "c", _checkpoint(net))
    wanted = {"state_dict": other.state_dict()}
    dcp.load(wanted, checkpoint_id=str(tmp_path / "c"))
    _assert_equal(other.state_dict(), net.state_dict())
    dcp_to_torch_save(str(tmp_path / "c"), str(tmp_path / "file.pt"))
    file = torch.load(tmp_path / "file.pt", weights_only=True)
    _Net().load_state_dict(file["state_dict"])
    assert file["air.trainer"]["checkpoint"]["global_step"] == 17
