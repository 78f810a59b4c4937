"""Parameter names without what wrappers put between: one name under every strategy.

``torch.compile``, activation checkpointing and FSDP1 wrap submodules, and the wrapper's attribute
shows in the names. A checkpoint of a compiled model under DDP must load into one that is not
compiled, or into FSDP2, and back.
"""

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_wrapper_in = re.compile("|".join(sorted(_WRAPPERS))).search


def clean(name: str) -> str:
    """Return the name that the parameter has in the module that was wrapped."""
    if _wrapper_in(name) is None:
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def renamed(state: Mapping[str, Any], wanted: Iterable[str]) -> Mapping[str, Any]:
    """Return ``state`` under the names of another module's state, where only wrappers differ.

    Args:
        state: A module's state dict.
        wanted: The names of the state dict of the module that is to load it.

    Returns:
        ``state`` itself where nothing differs; else a copy, with the module's metadata.
    """
    names = set(wanted)
    if names.issuperset(state):
        return state
    by_clean_name = {clean(name): name for name in names}
    found: OrderedDict[str, Any] = OrderedDict()
    for name, value in state.items():
        found[name if name in names else by_clean_name.get(clean(name), name)] = value
    # load_state_dict reads the versions of modules from this attribute.
    found.__dict__.update(getattr(state, "__dict__", {}))
    return found
