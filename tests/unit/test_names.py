"""Parameter names without those of wrappers."""

import pytest
import torch

from air_lightning.checkpoint.names import clean, renamed


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("layers.0.weight", "layers.0.weight"),
        ("_orig_mod.layers.0.weight", "layers.0.weight"),
        ("layers.0._checkpoint_wrapped_module.weight", "layers.0.weight"),
        ("a._fsdp_wrapped_module._orig_mod.b.bias", "a.b.bias"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
    ],
)
def test_clean(name: str, wanted: str) -> None:
    """Wrappers' attributes are left out, and names that only contain such a word are kept."""
    assert clean(name) == wanted


class Wrapped(torch.nn.Module):
    """Keeps a module as ``torch.compile`` does."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def test_a_wrapped_model_and_a_plain_one_load_each_other() -> None:
    """The state of either loads strictly into the other, with the versions of its modules."""
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    wrapped = torch.nn.Sequential(Wrapped(torch.nn.Linear(2, 2)), torch.nn.BatchNorm1d(2))
    for source, target in ((plain, wrapped), (wrapped, plain)):
        saved = source.state_dict()
        state = renamed(saved, target.state_dict())
        target.load_state_dict(state, strict=True)
        assert state._metadata == saved._metadata
        assert torch.equal(next(source.parameters()), next(target.parameters()))


def test_names_that_fit_are_not_copied() -> None:
    """Where every name is the module's own, the state itself is returned."""
    state = torch.nn.Linear(2, 2).state_dict()
    assert renamed(state, list(state)) is state
