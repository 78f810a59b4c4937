"""A save of many ranks: each entry written once, shares alike, collectives that do not grow."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor.debug import CommDebugMode

from air_lightning.checkpoint.blobs import SerializedBlob
from air_lightning.checkpoint.dcp import UCVolumeReader, UCVolumeWriter
from air_lightning.checkpoint.planner import SavePlanner, save
from air_lightning.checkpoint.sharing import (
    fingerprint,
    fingerprint_on_device,
    own_share,
    share_out,
)
from air_lightning.errors import SaveFailedError
from plans import item
from ranks import run_ranks


def test_what_all_ranks_hold_is_shared_out_evenly(tmp_path: Path) -> None:
    """Of 300 tensors on 64 ranks each is written by one rank, and no rank has a tensor too many."""
    items = [item(f"state_dict.t{i}", 1 + i % 7) for i in range(300)]
    paths = {entry.index.fqn: (entry.index.fqn,) for entry in items}
    planner, writer = SavePlanner(), UCVolumeWriter(tmp_path)
    planner.set_up_planner({}, None, is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([SavePlan(items, planner_data=paths)] * 64)
    plans = writer.prepare_global_plan(plans)
    written = Counter(entry.index.fqn for plan in plans for entry in plan.items)
    assert written == Counter({entry.index.fqn: 1 for entry in items})
    assert len(metadata.state_dict_metadata) == 300
    shares = [sum(entry.tensor_storage_size() or 0 for entry in plan.items) for plan in plans]
    assert max(shares) <= sum(shares) / len(shares) + 7 * 64 * 4


@given(
    sizes=st.dictionaries(st.text(max_size=5), st.integers(0, 1000), max_size=40),
    ranks=st.integers(1, 9),
)
def test_sharing_out_is_even_and_the_same_for_all(sizes: dict[str, int], ranks: int) -> None:
    """Each key has one writer, whatever the keys' order, and no rank has a tensor too many."""
    writers = share_out(sizes, ranks)
    assert writers == share_out(dict(reversed(sizes.items())), ranks)
    assert writers.keys() == sizes.keys()
    loads = [0] * ranks
    for key, rank in writers.items():
        loads[rank] += max(sizes[key], 1)
    assert max(loads) <= sum(loads) / ranks + max(sizes.values(), default=0) + 1


def _save_unlike(folder: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    group = dist.new_group(backend="gloo")
    common = {f"state_dict.t{i}": torch.full((3,), float(i)) for i in range(20)}
    for name, own in (("like", {}), ("unlike", {f"state_dict.of{rank}": torch.ones(2)})):
        blob = {f"air.rank.{rank}": SerializedBlob.of(rank)}
        writer = UCVolumeWriter(f"{folder}/{name}")
        listed = own_share({**common, **own, **blob}, group)
        save(listed, writer, process_group=group, no_dist=False)
        assert len(listed) == (22 if own else 11)
    lone = {"state_dict.statistics": torch.ones(9)} if rank == 0 else {}
    listed = own_share({**common, **lone}, group, unshared=set(lone))
    assert len(listed) == 10 + len(lone)
    _share_unsure(common, group)
    dist.destroy_process_group()


def _share_unsure(common: dict[str, torch.Tensor], group: Any) -> None:
    """What may differ is shared out where it does not, and rank 0's where it does."""
    rank = dist.get_rank()
    still = {f"state_dict.still{i}": torch.arange(5.0) for i in range(6)}
    moved = {f"state_dict.moved{i}": torch.arange(5.0) for i in range(3)}
    moved["state_dict.moved1"][4] += rank
    of_zero = {"state_dict.moved1"} if rank == 0 else set()
    listed = own_share({**common, **still, **moved}, group, unsure=[*still, *moved])
    assert {key for key in listed if key in still} == set(list(still)[rank::2])
    assert len(listed) == 14 + len(of_zero)
    assert "state_dict.moved1" in listed or not of_zero
    lone = {f"state_dict.of{rank}": torch.ones(1)}
    listed = own_share({**common, **still, **lone}, group, unsure=still)
    assert len(listed) == 21 + (6 if rank == 0 else 0)
    freed = torch.arange(5.0)
    freed.untyped_storage().resize_(0)
    for bad, error in ((object(), AttributeError), (freed, SaveFailedError)):
        broken = {**still, "state_dict.still0": still["state_dict.still0"] if rank else bad}
        if rank:
            assert len(own_share(broken, group, unsure=still)) == 0
        else:
            with pytest.raises(error):
                own_share(broken, group, unsure=still)


def test_ranks_that_hold_unlike_tensors_lose_none(tmp_path: Path) -> None:
    """Whether or not two ranks hold the same tensors, all of them are in the checkpoint once.

    What is known to be one rank's alone does not keep them from sharing the rest; of what may
    differ, and does, rank 0's is taken; a rank that fails before does not leave the other waiting.
    """
    log = tmp_path / "log"
    status = run_ranks(_save_unlike, str(tmp_path), world_size=2, log=log)
    assert status == [0, 0], log.read_text()
    for name, more in (("like", set()), ("unlike", {"state_dict.of0", "state_dict.of1"})):
        metadata = UCVolumeReader(tmp_path / name).read_metadata()
        blobs = {"air.rank.0", "air.rank.1"}
        tensors = {f"state_dict.t{i}" for i in range(20)} | more
        assert metadata.state_dict_metadata.keys() == tensors | blobs
        assert Counter(index.fqn for index in metadata.storage_data) == Counter(tensors | blobs)
        assert metadata.planner_data["state_dict.t7"] == ("state_dict", "t7")


def _pattern(dtype: torch.dtype, length: int) -> torch.Tensor:
    numbers = torch.arange(1, length * dtype.itemsize + 1) * 37 % 251
    return numbers.to(torch.uint8).view(dtype)


@given(
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]),
    length=st.integers(1, 700),
    places=st.lists(st.integers(0, 10**6), min_size=1, max_size=4, unique=True),
    bit=st.integers(0, 7),
)
def test_a_fingerprint_tells_any_difference(
    dtype: torch.dtype, length: int, places: list[int], bit: int
) -> None:
    """Flipped bits, signs of all elements and another order are told; a copy and a view are not."""
    value = _pattern(dtype, length)
    for take in (fingerprint, fingerprint_on_device):
        same = torch.cat([value[:1], value])[1:]
        assert take(value) == take(same)
        flipped = value.clone()
        for place in {place % value.nbytes for place in places}:
            flipped.view(torch.uint8)[place] ^= 1 << bit
        assert take(flipped) != take(value)
        assert torch.equal(value.view(torch.uint8), value.flip(0).view(torch.uint8)) or (
            take(value.flip(0)) != take(value)
        )
        if dtype.is_floating_point:
            assert take(-value) != take(value)


def _count_collectives(folder: str) -> None:
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    counts: list[Any] = []
    for tensors in (2, 200):
        entries = {f"state_dict.t{i}": torch.ones(3) for i in range(tensors)}
        writer = UCVolumeWriter(f"{folder}/{tensors}")
        with CommDebugMode() as mode:
            listed = own_share(entries, group, unsure=list(entries)[1:])
            save(listed, writer, process_group=group, no_dist=False)
        counts.append(dict(mode.get_comm_counts()))
    assert counts[0], "no collective was seen"
    assert counts[0] == counts[1]
    dist.destroy_process_group()


def test_the_number_of_collectives_does_not_grow_with_the_tensors(tmp_path: Path) -> None:
    """Two ranks saving 2 and 200 tensors take part in the same collectives, as often."""
    log = tmp_path / "log"
    status = run_ranks(_count_collectives, str(tmp_path), world_size=2, log=log)
    assert status == [0, 0], log.read_text()
