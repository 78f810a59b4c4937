"""Begin to copy a state before its entries are made: what lay so last time will be staged again.

Making the entries takes Python milliseconds, in which the memory could move already. Which bytes
of which tensors is known from the stage before::

    large_tensors   of the state, in the order of its keys
    Ahead.plan      where each of them went, and what is left for the stage
    Ahead.begin     where all of them lie as they lay then, the helper starts

Nothing is taken for granted by this: the stage compares its entries as ever, and copies anew where
they differ.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from air_lightning.checkpoint.moving import WHOLE, Block, Copying, is_helped, pieces

_CONTAINERS = frozenset({dict, OrderedDict, list})
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})  # foreign classes may lie anywhere
_LONGEST = 1 << 14  # items of a container; one of millions of numbers would take the call's time
_LARGE = 1 << 12  # elements from which looking at a tensor takes less than copying it

Form: TypeAlias = tuple[Any, ...]


class Ahead(NamedTuple):
    """What can be moved before the entries are there.

    Attributes:
        told: How all the tensors lie that it was planned for.
        whole: Which of them moves at once; the block holds no tensor of the state.
        parts: Those of large ones.
        rest: What is to be moved besides, once the entries are there.
    """

    told: list[Form]
    whole: list[tuple[int, Block]]
    parts: list[Block]
    rest: list[Block]

    @classmethod
    def plan(
        cls, told: list[Form], forms: Sequence[Form], buffers: Sequence[torch.Tensor]
    ) -> "Ahead":
        """Find, among the tensors told of, those that a stage copied.

        Args:
            told: How they lie.
            forms: How each of the entries lies; every copy was a move of memory.
            buffers: Where it was copied to. Those of one form are one view, with one buffer.
        """
        ahead = cls(told, [], [], [])
        left = dict(zip(forms, buffers, strict=True))
        if not is_helped(sum(buffer.nbytes for buffer in left.values())):
            return ahead
        for index, form in enumerate(told):
            buffer = left.pop(form, None)
            if buffer is None:
                continue
            if buffer.nbytes <= WHOLE:
                ahead.whole.append(
                    (index, Block(buffer.data_ptr(), form[0], buffer.nbytes, buffer))
                )
            else:
                ahead.parts.extend(pieces(buffer.data_ptr(), form[0], buffer.nbytes))
        for form, buffer in left.items():
            ahead.rest.extend(pieces(buffer.data_ptr(), form[0], buffer.nbytes))
        return ahead

    def begin(self, tensors: Sequence[torch.Tensor]) -> Copying | None:
        """Start the helper, if there is anything for it to do.

        Args:
            tensors: The plain ones told of, which lie now as they lay when this was planned.
        """
        whole = [Block(*block[:4], tensors[index]) for index, block in self.whole]
        blocks = whole + self.parts
        return Copying(blocks) if blocks else None


def form(t: torch.Tensor) -> Form:
    """What tells whether a plain tensor lies where it lay, in the same form; its address first."""
    bits = (t.is_conj(), t.is_neg(), t.is_cpu)
    return t.data_ptr(), t.shape, t.stride(), t.dtype, bits


def large_tensors(state: Mapping[Any, Any]) -> list[torch.Tensor]:
    """The large tensors of a state, as deep in plain dicts and lists as they are."""
    found: list[torch.Tensor] = []
    seen = {id(state)}
    todo: list[Iterable[Any]] = [state.values()]
    while todo:
        for value in todo.pop():
            kind = type(value)
            if kind in _CONTAINERS:
                if id(value) not in seen and len(value) <= _LONGEST:
                    seen.add(id(value))  # one that holds itself would be walked for ever
                    todo.append(value if kind is list else value.values())
            elif (kind in _PLAIN or isinstance(value, DTensor)) and value.numel() >= _LARGE:
                found.append(value)
    return found
