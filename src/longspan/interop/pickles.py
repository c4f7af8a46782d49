"""Pickles read as data: no name in a pickle is ever imported, and nothing it names is ever called.

A pickle is a program for a stack machine. This interpreter runs only the opcodes that build plain values. A
name becomes a `Global`, which is a string. An object, or the result of a call, becomes a `StandIn`, which
holds the name, the arguments and the state. A few names, such as those that rebuild tensors, have functions
of our own (`known`). Everything else is refused.
"""

from __future__ import annotations

import io
import mmap
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from longspan.errors import UserError

PROTOCOL = 5
LONGEST_KEY, LONGEST_NAME = 16, 1000
SCALARS = (str, int, float, bool, bytes, type(None))
OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # of Python 2

_ARGUMENTS = {  # opcodes that put their argument on the stack
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_NEW: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(frozen=True, eq=False, slots=True)
class Global:
    """The name of a class or a function."""

    name: str


@dataclass(eq=False, slots=True, repr=False)
class StandIn:
    """An object of an unknown class, or the result of a call that was not made."""

    name: str
    arguments: tuple[Any, ...]
    state: dict[str, Any] = field(default_factory=dict)


@dataclass
class Machine:
    """The state of an interpreter, and what it may rebuild."""

    known: Mapping[str, Callable[..., Any]]  # by the full name in the pickle
    persistent: Callable[[Any], Any]  # from the id of an object that the pickle does not contain
    limit: int  # entries that may be copied; a pickle can ask for the same copy again and again
    calls: set[str] = field(default_factory=set)  # names that the pickle calls; none was called
    stack: list[Any] = field(default_factory=list)
    marked: list[list[Any]] = field(default_factory=list)  # the stacks below each mark
    memo: dict[int, Any] = field(default_factory=dict)

    def read(self, source: io.BytesIO | mmap.mmap) -> Any:
        """The value of the pickle at the position of `source`; then the position is behind it."""
        self.stack, self.marked, self.memo = [], [], {}
        at = 0
        try:
            for opcode, argument, position in pickletools.genops(source):  # type: ignore[arg-type]
                at = position or 0
                if opcode.name == "STOP":
                    (value,) = self.stack
                    return value
                self.step(opcode.name, argument)
        except UserError as problem:
            raise UserError(f"{problem} (at byte {at} of its pickle)") from None
        except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError):
            pass
        raise UserError(f"it is damaged, or no pickle (near byte {at})")

    def step(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _ARGUMENTS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _NEW:
            stack.append(_NEW[name]())
        elif name in _TUPLES:
            count = _TUPLES[name]
            if len(stack) < count:
                raise IndexError
            stack[-count:] = [tuple(stack[-count:])]
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self.memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif name in _STEPS:
            _STEPS[name](self, argument)
        elif name == "PROTO":
            if argument > PROTOCOL:
                raise UserError(f"its pickle protocol {argument} is not known")
        elif name != "FRAME":
            raise UserError(f"the pickle opcode {name} is not supported")

    def copied(self, values: Any) -> Any:
        """Values to be copied, if the pickle has not asked for too many copies."""
        if type(values) not in (list, tuple, dict, set, frozenset):
            raise UserError("it makes a container of what is none")
        self.limit -= len(values)
        if self.limit < 0:
            raise UserError("it copies more than the file has")
        return values

    def since_mark(self) -> list[Any]:
        values, self.stack = self.stack, self.marked.pop()
        return values

    def call(self, callee: Any, arguments: Any) -> Any:
        """What the call stands for; only functions of `known` run."""
        if type(callee) not in (Global, StandIn) or type(arguments) is not tuple:
            raise UserError("it calls something that is not a name")
        if type(callee) is Global and callee.name in self.known:
            return self.known[callee.name](*arguments)
        self.calls.add(callee.name)
        return StandIn(callee.name, arguments)

    def build(self, target: Any, state: Any) -> None:
        """Give an object its attributes. Those of a dictionary or a tensor have no use here."""
        if type(target) is not StandIn:
            if type(target) is not dict and not isinstance(target, Tensor):
                raise UserError("it sets attributes of a plain value")
            return
        parts = state if type(state) is tuple and len(state) == 2 else (state,)  # attributes, then slots
        for part in parts:
            if type(part) is dict:
                entries = self.copied(part).items()
                target.state.update((key, value) for key, value in entries if type(key) is str)


def pairs(values: list[Any]) -> list[tuple[Any, Any]]:
    """Keys and values in turn, as pairs."""
    if len(values) % 2:
        raise UserError("a dictionary has a key without a value")
    return [(hashable(key), value) for key, value in zip(values[::2], values[1::2], strict=True)]


def hashable(key: Any) -> Any:
    """A key, if hashing it is quick: tuples in tuples could take for ever."""
    parts = key if type(key) is tuple and len(key) <= LONGEST_KEY else (key,)
    if all(isinstance(part, (*SCALARS, Global, StandIn, Tensor)) for part in parts) and not any(
        type(part) is int and part.bit_length() > 64 for part in parts
    ):
        return key
    raise UserError("a key of a dictionary or a member of a set is not a plain value")


def full_name(module: Any, name: Any) -> Global:
    if type(module) is not str or type(name) is not str or len(module) + len(name) > LONGEST_NAME:
        raise UserError("the name of a class is not text, or too long")
    return Global(f"{OLD_MODULES.get(module, module)}.{name}")


def _mark(machine: Machine, _: Any) -> None:
    machine.marked.append(machine.stack)
    machine.stack = []


def _pop(machine: Machine, _: Any) -> None:
    if machine.stack:
        machine.stack.pop()
    else:  # a pop may also remove a mark
        machine.since_mark()


def _pop_mark(machine: Machine, _: Any) -> None:
    machine.since_mark()


def _gather(make: Callable[[list[Any]], Any]) -> Callable[[Machine, Any], None]:
    """A step that makes one value of all since the mark."""

    def step(machine: Machine, _: Any) -> None:
        values = machine.since_mark()
        machine.stack.append(make(values))

    return step


def _extend(machine: Machine, values: list[Any]) -> None:
    target = machine.stack[-1]
    if type(target) is list:
        target.extend(values)
    elif type(target) is set:
        target.update(map(hashable, values))
    elif type(target) is not StandIn:  # of a class that is a list: what it lists has no use here
        raise UserError("it appends to what is no list")


def _set_items(machine: Machine, values: list[Any]) -> None:
    target, items = machine.stack[-1], pairs(values)
    if type(target) is dict:
        target.update(items)
    elif type(target) is not StandIn:
        raise UserError("it sets items of what is no dictionary")


def _append(machine: Machine, _: Any) -> None:
    value = machine.stack.pop()
    _extend(machine, [value])


def _set_item(machine: Machine, _: Any) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _set_items(machine, [key, value])


def _reduce(machine: Machine, _: Any) -> None:
    arguments, callee = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(machine.call(callee, arguments))


def _new(machine: Machine, _: Any) -> None:
    arguments, kind = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(_instance(machine, kind, arguments))


def _new_with_names(machine: Machine, _: Any) -> None:
    machine.stack.pop()  # the named arguments
    _new(machine, None)


def _object(machine: Machine, _: Any) -> None:
    kind, *arguments = machine.since_mark()
    machine.stack.append(_instance(machine, kind, tuple(arguments)))


def _instance_of_name(machine: Machine, argument: str) -> None:
    kind, arguments = full_name(*argument.split(" ", 1)), machine.since_mark()
    machine.stack.append(_instance(machine, kind, tuple(arguments)))


def _instance(machine: Machine, kind: Any, arguments: Any) -> Any:
    if type(kind) is not Global or type(arguments) is not tuple:
        raise UserError("it makes an object of what is no class")
    if kind.name in machine.known:
        return machine.call(kind, arguments)
    return StandIn(kind.name, arguments)


def _build(machine: Machine, _: Any) -> None:
    state = machine.stack.pop()
    machine.build(machine.stack[-1], state)


def _named(machine: Machine, argument: str) -> None:
    machine.stack.append(full_name(*argument.split(" ", 1)))


def _named_by_stack(machine: Machine, _: Any) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(full_name(module, name))


def _persistent(machine: Machine, _: Any) -> None:
    machine.stack.append(machine.persistent(machine.stack.pop()))


_STEPS: dict[str, Callable[[Machine, Any], None]] = {
    "MARK": _mark,
    "POP": _pop,
    "POP_MARK": _pop_mark,
    "DUP": lambda machine, _: machine.stack.append(machine.stack[-1]),
    "TUPLE": _gather(tuple),
    "LIST": _gather(list),
    "DICT": _gather(lambda values: dict(pairs(values))),
    "FROZENSET": _gather(lambda values: frozenset(map(hashable, values))),
    "APPEND": _append,
    "APPENDS": lambda machine, _: _extend(machine, machine.since_mark()),
    "ADDITEMS": lambda machine, _: _extend(machine, machine.since_mark()),
    "SETITEM": _set_item,
    "SETITEMS": lambda machine, _: _set_items(machine, machine.since_mark()),
    "GLOBAL": _named,
    "STACK_GLOBAL": _named_by_stack,
    "REDUCE": _reduce,
    "NEWOBJ": _new,
    "NEWOBJ_EX": _new_with_names,
    "OBJ": _object,
    "INST": _instance_of_name,
    "BUILD": _build,
    "BINPERSID": _persistent,
}
