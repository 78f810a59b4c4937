"""Staging: exact copies, once per storage, in memory that stays flat."""

import gc
import mmap
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from air_lightning.checkpoint.ahead import large_tensors
from air_lightning.checkpoint.blobs import SerializedBlob
from air_lightning.checkpoint.staging import Stager, is_dense
from air_lightning.errors import SaveFailedError


def _same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tolist() == b.tolist()


def _bits(tensor):
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


VARIED = {
    "contiguous": torch.randn(3, 4),
    "transposed": torch.randn(3, 4).t(),
    "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "strided": torch.randn(10, 10)[::2, ::3],
    "expanded": torch.randn(1, 4).expand(3, 4),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 7),
    "bool": torch.tensor([True, False]),
    "bfloat16": torch.randn(5).bfloat16(),
    "float8": torch.randn(5).to(torch.float8_e4m3fn),
    "complex": torch.randn(4, dtype=torch.complex64),
    "conjugated": torch.randn(4, dtype=torch.complex64).conj(),
    "parameter": torch.nn.Parameter(torch.randn(3)),
    "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
}


def test_copies_are_exact_and_independent():
    """Every dtype and layout is copied bit for bit, and later changes do not reach the copy."""
    entries = {key: value.clone() if key == "strided" else value for key, value in VARIED.items()}
    entries["strided"] = VARIED["strided"]
    expected = {key: _bits(value) for key, value in entries.items()}
    staged = Stager().stage(entries)
    assert list(staged) == list(entries)
    for key, value in staged.items():
        assert _bits(value) == expected[key], key
        assert value.dtype == entries[key].dtype
        assert value.shape == entries[key].shape
        assert not value.requires_grad
        if value.numel():
            assert value.untyped_storage().data_ptr() != entries[key].untyped_storage().data_ptr()


def test_memory_format_is_kept():
    """A dense tensor keeps its strides, so that a resumed channels_last model runs as before."""
    staged = Stager().stage(VARIED)
    assert staged["channels_last"].is_contiguous(memory_format=torch.channels_last)
    assert staged["transposed"].stride() == VARIED["transposed"].stride()
    assert staged["strided"].is_contiguous()


def test_each_copy_is_a_storage_of_its_own():
    """A writer finds storages of exactly the tensor's size, and need not copy again."""
    for value in Stager().stage(VARIED).values():
        assert value.untyped_storage().nbytes() == value.nbytes


def test_small_view_copies_only_itself():
    """A row of a large tensor costs a row."""
    large = torch.zeros(1000, 1000)
    stager = Stager()
    stager.stage({"row": large[0]})
    assert stager.nbytes < 8192


def test_tied_weights_are_copied_once():
    """Two names of one tensor share one copy; two tensors of equal values do not."""
    weight = torch.randn(1000)
    stager = Stager()
    staged = stager.stage({"a": weight, "b": weight, "c": weight.clone()})
    assert staged["a"].data_ptr() == staged["b"].data_ptr() != staged["c"].data_ptr()
    assert stager.nbytes < 3 * weight.nbytes


def test_weights_that_are_no_longer_tied_are_told_apart():
    """Untying without a change of shape gives each its own values at the next save."""
    weight = torch.randn(10)
    stager = Stager()
    stager.stage({"a": weight, "b": weight})
    other = torch.randn(10)
    staged = stager.stage({"a": weight, "b": other})
    assert _same(staged["a"], weight)
    assert _same(staged["b"], other)


def test_buffers_are_reused_over_fifty_saves():
    """The same memory serves every save of the same state."""
    stager = Stager()
    state = {f"p{i}": torch.randn(i + 1, 50) for i in range(20)}
    first = {key: value.data_ptr() for key, value in stager.stage(state).items()}
    kept = stager.nbytes
    for _ in range(50):
        state["p3"].add_(1)
        staged = stager.stage(state)
        assert {key: value.data_ptr() for key, value in staged.items()} == first
        assert _same(staged["p3"], state["p3"])
    assert stager.nbytes == kept


def test_state_that_grows_and_changes_shape_is_followed():
    """Entries that appear, vanish, or change shape or dtype between saves are copied right."""
    stager = Stager()
    for state in (
        {"a": torch.randn(3)},
        {"a": torch.randn(3), "b": torch.randn(400)},
        {"a": torch.randn(5, 5)},
        {"b": torch.randn(7).double(), "a": torch.arange(4)},
    ):
        staged = stager.stage(state)
        assert all(_same(staged[key], value) for key, value in state.items())
        assert staged.keys() == state.keys()


BASE = torch.randn(8, dtype=torch.complex64)
CHANGES = {
    "same": lambda t: t,
    "other_memory": lambda t: t.clone(),
    "other_view": lambda t: t.t() if t.dim() == 2 else t[None],
    "other_numbers": lambda t: t.mul(2),
    "conjugated": lambda t: t.conj(),
    "negated": lambda t: t.conj().imag if t.is_complex() else torch.complex(t, t).conj().imag,
    "smaller": lambda t: t[:1],
}


@settings(max_examples=60, deadline=None)
@given(
    changes=st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(sorted(CHANGES))), max_size=8)
)
def test_what_changes_between_saves_is_always_seen(changes):
    """Whatever becomes of a tensor in place or otherwise, each stage copies what is there now."""
    stager, state = Stager(), {"a": BASE.clone(), "b": torch.randn(2, 4)}
    for key, change in [("a", "same"), *changes]:
        state[key] = CHANGES[change](state[key])
        for _ in range(3):
            staged = stager.stage(state)
            assert all(_same(staged[name], value) for name, value in state.items())
            for value in state.values():
                value.add_(1)


def test_large_states_are_copied_by_two_threads(monkeypatch):
    """A state large enough for the helper is copied whole, across piece boundaries."""
    monkeypatch.setattr("air_lightning.checkpoint.moving._HELPED", 1 << 20)
    state = {"a": torch.randint(0, 255, ((9 << 20) + 3,), dtype=torch.uint8), "b": torch.randn(99)}
    stager = Stager()
    for _ in range(5):
        staged = stager.stage(state)
        assert all(torch.equal(staged[key], value) for key, value in state.items())
        state["a"].add_(1)


@pytest.fixture
def helped(monkeypatch):
    """Two threads move the smallest state."""
    monkeypatch.setattr("air_lightning.checkpoint.moving._HELPED", 1)
    monkeypatch.setattr("air_lightning.checkpoint.moving._cores", lambda: 2)


@pytest.mark.usefixtures("helped")
@settings(max_examples=60, deadline=None)
@given(
    changes=st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from(sorted(CHANGES))), max_size=8
    ),
    told=st.lists(st.sampled_from("ab"), unique=True),
    is_left=st.booleans(),
)
def test_what_was_begun_is_staged_exactly(changes, told, is_left):
    """Whatever changed since the last stage, told of or not, a stage copies what is there."""
    stager, state = Stager(), {"a": BASE.clone(), "b": torch.randn(2, 4)}
    for key, change in [("a", "same"), *changes]:
        state[key] = CHANGES[change](state[key])
        for _ in range(3):
            stager.begin([state[name] for name in told])
            if is_left:
                stager.leave()
                for value in state.values():
                    value.add_(1)
            staged = stager.stage(state)
            stager.leave()
            assert all(_same(staged[name], value) for name, value in state.items())
            for value in state.values():
                value.add_(1)


@pytest.mark.usefixtures("helped")
def test_what_lies_as_it_lay_is_copied_before_there_are_entries():
    """Whole tensors and parts of large ones reach the buffers of the stage before."""
    tensors = [torch.randn(8, 9), torch.zeros((17 << 20) + 3, dtype=torch.uint8)]
    stager = Stager()
    stager.begin(tensors)
    staged = stager.stage({"a": tensors[0], "b": tensors[1], "c": torch.randn(5)})
    for tensor in tensors:
        tensor.add_(1)
    stager.begin(tensors)
    while not all(
        torch.equal(staged[key], tensor) for key, tensor in zip("ab", tensors, strict=True)
    ):
        pass  # until the helper is there; the test's timeout is the bound
    stager.leave()


@pytest.mark.usefixtures("helped")
def test_nothing_is_written_after_what_was_begun_was_left():
    """Once a failed call has left, changes of the state reach no buffer."""
    tensors = [torch.zeros(2000) for _ in range(200)]
    stager = Stager()
    for value in range(1, 20):
        stager.begin(tensors)
        staged = stager.stage({str(i): tensor for i, tensor in enumerate(tensors)})
        stager.begin(tensors)
        stager.leave()
        for tensor in tensors:
            tensor.fill_(value)
        assert all(buffer.eq(value - 1).all() for buffer in staged.values())


@pytest.mark.usefixtures("helped")
@pytest.mark.parametrize("modes", [(True, False, False), (False, True, False), (True, True, False)])
def test_copies_begun_in_and_out_of_inference_mode(modes):
    """Buffers made in inference mode, as during a validation, are filled outside it, and so on."""
    stager, weight = Stager(), torch.nn.Parameter(torch.randn(50, 50))
    for mode in modes:
        with torch.inference_mode(mode):
            stager.begin([weight])
            assert _bits(stager.stage({"w": weight})["w"]) == _bits(weight)
            stager.leave()
        with torch.no_grad():
            weight.add_(1)


def test_a_state_that_holds_itself_is_walked_once():
    """Large tensors are found however deep, small ones and other objects passed over."""
    large = [torch.zeros(5000), torch.nn.Parameter(torch.zeros(100, 100))]
    state = {"a": large[0], "small": torch.ones(3), 1: [{"b": large[1]}, None, object()]}
    state[1].append(state)
    assert [id(tensor) for tensor in large_tensors(state)] == [id(tensor) for tensor in large]


def test_a_list_of_very_many_numbers_is_not_walked():
    """What a callback has collected over a run costs no call its time."""
    state = {"collected": [0.5] * (1 << 15) + [torch.zeros(5000)], "large": torch.ones(5000)}
    assert [id(tensor) for tensor in large_tensors(state)] == [id(state["large"])]


def test_prepared_buffers_serve_the_first_stage():
    """After reserve, staging allocates nothing."""
    stager = Stager()
    state = {"a": torch.randn(1000)}
    stager.reserve(state.values())
    kept, slab = stager.nbytes, stager._slab
    assert torch.equal(stager.stage(state)["a"], state["a"])
    assert stager.nbytes == kept
    assert stager._slab is slab


def test_forked_child_may_drop_the_buffers():
    """A loader worker that drops an inherited stager harms none of its own memory."""
    stager = Stager()
    staged = stager.stage({"a": torch.ones(8 << 20)})
    pid = os.fork()
    if pid == 0:
        own = [mmap.mmap(-1, 32 << 20) for _ in range(8)]
        del stager, staged
        gc.collect()
        for memory in own:
            memory[:: 1 << 20] = b"x" * 32
        os._exit(0 if all(memory[0] == ord("x") for memory in own) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert torch.equal(staged["a"], torch.ones(8 << 20))


@pytest.mark.parametrize("left", [0, 16])
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(100, 100),
        lambda: torch.randn(100, 100)[:, ::2],
        lambda: torch.randn(100, 100).t()[3:],
        lambda: torch.randn(100, dtype=torch.complex64).conj(),
        lambda: torch.nn.Parameter(torch.randn(100)),
    ],
    ids=["dense", "gaps", "transposed", "conjugated", "parameter"],
)
def test_a_tensor_whose_memory_was_freed_is_refused(make, left):
    """Its storage emptied or shortened between two saves, the error names it; later ones work."""
    stager = Stager()
    tensors = {"other": torch.ones(3), "w": make()}
    for _ in range(2):
        stager.stage(tensors)
    storage = tensors["w"].detach().untyped_storage()
    before = storage.nbytes()
    storage.resize_(left)
    with pytest.raises(SaveFailedError, match=rf"tensor w of shape .* which holds {left}"):
        stager.stage(tensors)
    storage.resize_(before)
    tensors["w"].detach().copy_(make().detach())
    assert _bits(stager.stage(tensors)["w"]) == _bits(tensors["w"])


def test_blobs_pass():
    """What is no tensor is handed on as it is."""
    blob = SerializedBlob.of({"a": 1})
    assert Stager().stage({"x": blob, "n": None}) == {"x": blob, "n": None}


def test_no_entries():
    """Nothing to copy is no error."""
    assert Stager().stage({}) == {}


def test_dense_is_told_from_overlapping_and_gapped():
    """Permuted blocks are dense; slices and expansions are not."""
    assert is_dense(torch.empty(2, 3, 4).permute(2, 0, 1))
    assert is_dense(torch.empty(2, 1, 4).transpose(0, 1))
    assert not is_dense(torch.empty(4, 4)[:, :2])
    assert not is_dense(torch.empty(1, 4).expand(3, 4))


def test_copies_are_on_the_cpu_whatever_the_default_device():
    """Under torch.set_default_device, empty and other tensors are staged in CPU memory."""
    entries = {"a": torch.arange(12.0).reshape(3, 4).T, "none": torch.empty(0, 3)}
    torch.set_default_device("meta")
    try:
        staged = Stager().stage(entries)
    finally:
        torch.set_default_device(None)
    assert [staged[key].device.type for key in entries] == ["cpu", "cpu"]
    assert torch.equal(staged["a"], entries["a"])
