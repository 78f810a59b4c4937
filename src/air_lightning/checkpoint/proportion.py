"""What a pickle would take to load, found out without loading it.

Pickles are programs, and C's unpickler runs them with no bound on anything:

* memory: a memo index of a billion, nine bytes of a pickle, makes it fill as many places; calls
  with the same long list again and again multiply that list;
* time: the hash of a tuple of one tuple twice, of one tuple twice, ... eighty times, never ends;
* the process: the hash of tuples nested a million deep overflows the C stack.

So the program is run first with weights in place of objects: what it would cost to hash a value, or
to copy it. That takes a fraction of what Python's own unpickler would. What is refused here is
nothing that a pickler writes of DCP metadata. Of blobs, which may hold any values, only the depth
of tuples and the memo are looked at.
"""

import pickle
from collections.abc import Callable
from typing import TypeAlias

_HEAVIEST = 4096  # to hash, or to give to a call: shapes, paths of names, arguments
_LONGEST_NUMBER = 255  # bytes, or digits
_DEEPEST = 1000  # tuples within tuples of a blob: Python's own limit for calls


class _Container:
    """A value that changes: a list, a dict, a set or an object."""

    __slots__ = ("held", "size", "weight")

    def __init__(self, weight: int = 1) -> None:
        self.weight = weight
        self.size = 0  # without what its items hold
        self.held = False  # a tuple or a key has it: its weight was counted


_Value: TypeAlias = "int | _Container"


class _Scan:
    """Runs a pickle with weights; every method is one opcode, or several alike."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[_Value] = []
        self.marks: list[list[_Value]] = []
        self.memo: dict[int, _Value] = {}
        self.budget = len(data)

    def run(self) -> None:
        data, operations, sizes = self.data, _OPERATIONS, _SIZES
        while True:
            code = data[self.at]
            self.at += 1
            # Of a hundred opcodes seventy are one of these three: no call for them.
            if sizes[code] >= 0:
                self.at += sizes[code]
                self.stack.append(1)
            elif code == _MEMOIZE:
                self.memo[len(self.memo)] = self.stack[-1]
            elif code == _BINGET:
                self.stack.append(self.memo[data[self.at]])
                self.at += 1
            elif code == _STOP:
                return
            else:
                operations[code](self)

    def number(self, size: int) -> int:
        end = self.at + size
        if end > len(self.data):
            raise IndexError
        value = int.from_bytes(self.data[self.at : end], "little")
        self.at = end
        return value

    def skip(self, size: int) -> None:
        self.at += size
        if self.at > len(self.data):
            raise pickle.UnpicklingError(f"{size} bytes are claimed beyond its end")

    def line(self) -> bytes:
        end = self.data.index(b"\n", self.at)
        text, self.at = self.data[self.at : end], end + 1
        return text

    def since_mark(self) -> list[_Value]:
        items, self.stack = self.stack, self.marks.pop()
        return items

    def pay(self, value: _Value) -> None:
        self.budget -= value if isinstance(value, int) else value.size
        if self.budget < 0:
            raise pickle.UnpicklingError("it copies the same values over and over")

    def tuple_of(self, items: list[_Value]) -> None:
        self.stack.append(_hold(1 + sum(map(_weight, items)), items))

    def grow(self, items: list[_Value], keys: list[_Value]) -> None:
        container = self.stack[-1]
        if not isinstance(container, _Container) or container.held:
            raise pickle.UnpicklingError("a value changes that others hold")
        for key in keys:
            _hold(_weight(key), [key])
        container.size += len(items)
        container.weight += len(items) + sum(map(_weight, items))


class _DepthScan(_Scan):
    """Runs a blob of torch.save's, whose values may be any: ints are depths of tuples here."""

    def pay(self, value: _Value) -> None:
        pass

    def tuple_of(self, items: list[_Value]) -> None:
        depth = 1 + max((item for item in items if isinstance(item, int)), default=0)
        if depth > _DEEPEST:
            raise DisproportionError(f"it nests tuples more than {_DEEPEST} deep")
        self.stack.append(depth)

    def grow(self, items: list[_Value], keys: list[_Value]) -> None:
        pass


class DisproportionError(pickle.UnpicklingError):
    """A pickle would end the process: by the hash of nested tuples, or by memory for its memo."""


def _weight(value: _Value) -> int:
    return value if isinstance(value, int) else value.weight


def _hold(weight: int, items: list[_Value]) -> int:
    if weight > _HEAVIEST:
        raise pickle.UnpicklingError("values nested or long beyond what DCP metadata has")
    for item in items:
        if isinstance(item, _Container):
            item.held = True
    return weight


def _sized_atom(width: int, most: int | None = None) -> Callable[[_Scan], None]:
    def sized_atom(scan: _Scan) -> None:
        size = scan.number(width)
        if most is not None and size > most:
            raise pickle.UnpicklingError(f"a number of {size} bytes")
        scan.skip(size)
        scan.stack.append(1)

    return sized_atom


def _line_atom(scan: _Scan) -> None:
    scan.line()
    scan.stack.append(1)


def _line_number(scan: _Scan) -> None:
    if len(scan.line()) > _LONGEST_NUMBER:
        raise pickle.UnpicklingError("a number of too many digits")
    scan.stack.append(1)


def _put(scan: _Scan, index: int) -> None:
    if index > len(scan.data):
        raise DisproportionError(f"it has a memo index of {index}")
    scan.memo[index] = scan.stack[-1]


def _tuple(size: int) -> Callable[[_Scan], None]:
    def make(scan: _Scan) -> None:
        items = [scan.stack.pop() for _ in range(size)]
        scan.tuple_of(items)

    return make


def _mark(scan: _Scan) -> None:
    scan.marks.append(scan.stack)
    scan.stack = []


def _container(scan: _Scan) -> None:
    scan.stack.append(_Container())


def _filled(scan: _Scan) -> None:
    items = scan.since_mark()
    scan.stack.append(_Container())
    scan.grow(items, items)


def _append(scan: _Scan) -> None:
    item = scan.stack.pop()
    scan.grow([item], [])


def _appends(scan: _Scan) -> None:
    items = scan.since_mark()
    scan.grow(items, [])


def _additems(scan: _Scan) -> None:
    items = scan.since_mark()
    scan.grow(items, items)


def _setitem(scan: _Scan) -> None:
    value, key = scan.stack.pop(), scan.stack.pop()
    scan.grow([key, value], [key])


def _setitems(scan: _Scan) -> None:
    items = scan.since_mark()
    scan.grow(items, items[::2])


def _call(arguments: int) -> Callable[[_Scan], None]:
    def call(scan: _Scan) -> None:
        weight = 1
        for _ in range(arguments):
            given = scan.stack.pop()
            scan.pay(given)
            weight += _weight(given)
        scan.stack.pop()
        scan.stack.append(_Container(weight))

    return call


def _build(scan: _Scan) -> None:
    state = scan.stack.pop()
    scan.pay(state)
    target = scan.stack[-1]
    if not isinstance(target, _Container):
        return  # a class, perhaps: unpickle.py sees to these
    scan.grow([state], [])


def _global(scan: _Scan) -> None:
    scan.line()
    scan.line()
    scan.stack.append(1)


def _stack_global(scan: _Scan) -> None:
    del scan.stack[-2:]
    scan.stack.append(1)


def _persistent(_: _Scan) -> None:
    """One value for another; an unpickler that knows none refuses."""


def _refuse(_: _Scan) -> None:
    raise pickle.UnpicklingError("an opcode that DCP metadata does not need")


_STOP, _MEMOIZE, _BINGET = pickle.STOP[0], pickle.MEMOIZE[0], pickle.BINGET[0]
_FIXED = dict.fromkeys((pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.EMPTY_TUPLE), 0)
_FIXED |= {pickle.BININT1: 1, pickle.BININT2: 2, pickle.BININT: 4, pickle.BINFLOAT: 8}
_SIZES = [_FIXED.get(bytes([code]), -1) for code in range(256)]
_TABLE: dict[bytes, Callable[[_Scan], None]] = {
    pickle.PROTO: lambda scan: scan.skip(1),
    pickle.FRAME: lambda scan: scan.skip(8),
    pickle.SHORT_BINUNICODE: _sized_atom(1),
    pickle.SHORT_BINBYTES: _sized_atom(1),
    pickle.SHORT_BINSTRING: _sized_atom(1),
    pickle.BINUNICODE: _sized_atom(4),
    pickle.BINBYTES: _sized_atom(4),
    pickle.BINSTRING: _sized_atom(4),
    pickle.BINUNICODE8: _sized_atom(8),
    pickle.BINBYTES8: _sized_atom(8),
    pickle.LONG1: _sized_atom(1),
    pickle.LONG4: _sized_atom(4, _LONGEST_NUMBER),
    **dict.fromkeys((pickle.STRING, pickle.UNICODE), _line_atom),
    **dict.fromkeys((pickle.INT, pickle.LONG, pickle.FLOAT), _line_number),
    pickle.GLOBAL: _global,
    pickle.BINPERSID: _persistent,
    pickle.STACK_GLOBAL: _stack_global,
    pickle.PUT: lambda scan: _put(scan, int(scan.line())),
    pickle.BINPUT: lambda scan: _put(scan, scan.number(1)),
    pickle.LONG_BINPUT: lambda scan: _put(scan, scan.number(4)),
    pickle.GET: lambda scan: scan.stack.append(scan.memo[int(scan.line())]),
    pickle.LONG_BINGET: lambda scan: scan.stack.append(scan.memo[scan.number(4)]),
    pickle.MARK: _mark,
    pickle.TUPLE: lambda scan: scan.tuple_of(scan.since_mark()),
    pickle.TUPLE1: _tuple(1),
    pickle.TUPLE2: _tuple(2),
    pickle.TUPLE3: _tuple(3),
    **dict.fromkeys((pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.EMPTY_SET), _container),
    pickle.LIST: _filled,
    pickle.DICT: _filled,
    pickle.FROZENSET: _filled,
    pickle.APPEND: _append,
    pickle.APPENDS: _appends,
    pickle.ADDITEMS: _additems,
    pickle.SETITEM: _setitem,
    pickle.SETITEMS: _setitems,
    pickle.REDUCE: _call(1),
    pickle.NEWOBJ: _call(1),
    pickle.NEWOBJ_EX: _call(2),
    pickle.BUILD: _build,
}
_OPERATIONS = [_TABLE.get(bytes([code]), _refuse) for code in range(256)]


def require_shallow(data: bytes) -> bool:
    """Refuse a pickle whose tuples are nested too deep; what else is wrong, torch says.

    Returns:
        Whether it was seen to its end. One that was not has something that torch refuses.

    Raises:
        DisproportionError: They are, or its memo is far larger than itself.
    """
    try:
        _DepthScan(data).run()
    except DisproportionError:
        raise
    except (IndexError, KeyError, ValueError, pickle.UnpicklingError):
        return False
    return True


def require_proportion(data: bytes) -> None:
    """Refuse a pickle that would take memory, time or stack out of proportion to its size.

    Raises:
        UnpicklingError: It would, or is no pickle.
    """
    try:
        _Scan(data).run()
    except (IndexError, KeyError, ValueError) as error:
        raise pickle.UnpicklingError(f"it is cut or altered ({error or 'no end'})") from error
