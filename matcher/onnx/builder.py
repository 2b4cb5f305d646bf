"""Graphs written operation by operation, in Python's operators.

A `Builder` collects nodes; a `Value` is what one of them gives. Branches and loops are functions that are
called once, to write down what happens in them; they may use every value from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from matcher.onnx.protobuf import Body, Node, Port, encode_model

Number = float | int | bool
LAST = 2**63 - 1  # a slice to the end
CONTRIBUTED = "com.microsoft"  # operators of ONNX Runtime that are in no standard


@dataclass(frozen=True, eq=False)
class Value:
    """What a node gives; arithmetic with numbers takes float as float32 and int as int64."""

    name: str
    graph: Builder
    __array_ufunc__ = None  # an array before an operator leaves it to this class

    def __add__(self, other: Operand) -> Value:
        return self.graph.Add(self, other)

    def __radd__(self, other: Operand) -> Value:
        return self.graph.Add(other, self)

    def __sub__(self, other: Operand) -> Value:
        return self.graph.Sub(self, other)

    def __rsub__(self, other: Operand) -> Value:
        return self.graph.Sub(other, self)

    def __mul__(self, other: Operand) -> Value:
        return self.graph.Mul(self, other)

    def __rmul__(self, other: Operand) -> Value:
        return self.graph.Mul(other, self)

    def __truediv__(self, other: Operand) -> Value:
        return self.graph.Div(self, other)

    def __rtruediv__(self, other: Operand) -> Value:
        return self.graph.Div(other, self)

    def __matmul__(self, other: Operand) -> Value:
        return self.graph.MatMul(self, other)

    def __neg__(self) -> Value:
        return self.graph.Neg(self)

    def __gt__(self, other: Operand) -> Value:
        return self.graph.Greater(self, other)

    def __lt__(self, other: Operand) -> Value:
        return self.graph.Less(self, other)

    def __ge__(self, other: Operand) -> Value:
        return self.graph.GreaterOrEqual(self, other)

    def __le__(self, other: Operand) -> Value:
        return self.graph.LessOrEqual(self, other)

    def __and__(self, other: Operand) -> Value:
        return self.graph.And(self, other)

    def __or__(self, other: Operand) -> Value:
        return self.graph.Or(self, other)

    def __invert__(self) -> Value:
        return self.graph.Not(self)


Operand = Value | Number | np.ndarray | Sequence[int]


class Builder:
    """A model's graph while it is written; `graph.Name(…)` adds the ONNX operator of that name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._scopes: list[list[Node]] = [[]]
        self._inputs: list[Port] = []
        self._outputs: list[Port] = []
        self._initialisers: dict[str, np.ndarray] = {}
        self._known: dict[tuple, str] = {}
        self._domains: dict[str, int] = {}
        self._count = 0

    def __getattr__(self, operator: str) -> Callable[..., Any]:
        if not operator[:1].isupper():
            raise AttributeError(operator)

        def add(*inputs: Operand | None, outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
            return self._add(operator, inputs, outputs, domain, attributes)

        return add

    def _add(
        self, operator: str, inputs: Sequence[Operand | None], outputs: int, domain: str, attributes: dict
    ) -> Any:
        names = ["" if value is None else self.value(value).name for value in inputs]
        made = [self._fresh(operator) for _ in range(outputs)]
        given = {key: value for key, value in attributes.items() if value is not None}
        self._scopes[-1].append(Node(operator, names, made, given, domain))
        if domain:
            self._domains[domain] = 1
        values = tuple(Value(name, self) for name in made)
        return values[0] if outputs == 1 else values

    def _fresh(self, stem: str) -> str:
        self._count += 1
        return f"{stem}_{self._count}"

    def value(self, operand: Operand) -> Value:
        """A value as it is; a number or array as a constant."""
        if isinstance(operand, Value):
            return operand
        array = np.asarray(operand)
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self._known:
            self._known[key] = self._fresh("constant")
            self._initialisers[self._known[key]] = array
        return Value(self._known[key], self)

    def weight(self, name: str, array: np.ndarray) -> Value:
        """A named array of the model."""
        self._initialisers[name] = array
        return Value(name, self)

    def input(self, name: str, dtype: str, *shape: int | str) -> Value:
        """An input of the model; dimensions that vary are named."""
        self._inputs.append(Port(name, dtype, shape))
        return Value(name, self)

    def output(self, name: str, value: Value, dtype: str, *shape: int | str) -> None:
        """An output of the model."""
        self._scopes[0].append(Node("Identity", [value.name], [name]))
        self._outputs.append(Port(name, dtype, shape))

    def size(self, x: Value, axis: int) -> Value:
        """(1,) int64: the length of one axis."""
        return self.Shape(x, start=axis, end=axis + 1 if axis != -1 else None)

    def scalar(self, x: Value) -> Value:
        """(1,) → ()."""
        return self.Squeeze(x, [0])

    def slice(self, x: Value, axis: int, start: Operand = 0, end: Operand = LAST) -> Value:
        """Entries `start` up to, not including, `end` along one axis; (1,) values or numbers."""
        bounds = ([each] if isinstance(each, int) else each for each in (start, end))
        return self.Slice(x, *bounds, [axis])

    def entry(self, x: Value, index: Operand, axis: int = 0) -> Value:
        """One entry along an axis, which is dropped."""
        return self.Gather(x, index, axis=axis)

    def integer(self, x: Value) -> Value:
        """As int64."""
        return self.Cast(x, to=7)

    def real(self, x: Value) -> Value:
        """As float32."""
        return self.Cast(x, to=1)

    def double(self, x: Value) -> Value:
        """As float64."""
        return self.Cast(x, to=11)

    def boolean(self, x: Value) -> Value:
        """As bool."""
        return self.Cast(x, to=9)

    def total(self, x: Value, axis: int, *, keep: bool = False) -> Value:
        """Sum along an axis."""
        return self._reduced(self.ReduceSum(x, [axis]), axis, keep=keep)

    def maximum(self, x: Value, axis: int, *, keep: bool = False) -> Value:
        """The largest along an axis."""
        return self._reduced(self.ReduceMax(x, [axis]), axis, keep=keep)

    def _reduced(self, x: Value, axis: int, *, keep: bool) -> Value:
        # OpenCV takes the axis away wrongly where it is the only one.
        return x if keep else self.Squeeze(x, [axis])

    def range(self, count: Value) -> Value:
        """(1,) n → (n,) int64: 0 … n − 1."""
        return self.Range(0, self.scalar(count), 1)

    def full(self, shape: Value, number: Number) -> Value:
        """A constant of a shape (k,)."""
        return self.ConstantOfShape(shape, value=self._single(number))

    @staticmethod
    def _single(number: Number) -> np.ndarray:
        kind = np.bool_ if isinstance(number, bool) else np.int64 if isinstance(number, int) else np.float32
        return np.array([number], dtype=kind)

    def either(
        self, condition: Value, yes: Callable[[], Sequence[Value]], no: Callable[[], Sequence[Value]]
    ) -> tuple[Value, ...]:
        """What `yes` gives if the condition holds, else what `no` gives; one value for each of theirs."""
        branches = {"then_branch": self._body(yes), "else_branch": self._body(no)}
        count = len(branches["then_branch"].outputs)
        found = self.If(condition, outputs=count, **branches)
        return found if count > 1 else (found,)

    def _body(self, write: Callable[[], Sequence[Value]]) -> Body:
        self._scopes.append([])
        ends = self._made_here(write())
        nodes = self._scopes.pop()
        return Body(self._fresh("body"), nodes, [], [Port(value.name) for value in ends])

    def _made_here(self, values: Sequence[Operand]) -> list[Value]:
        """The values as outputs of the innermost body, which must be made in it, each by its own name."""
        free = {name for node in self._scopes[-1] for name in node.outputs}
        ends = []
        for value in map(self.value, values):
            ends.append(value if value.name in free else self.Identity(value))
            free.discard(value.name)
        return ends

    def loop(
        self,
        limit: Operand | None,
        carried: Sequence[Operand],
        step: Callable[..., tuple[Operand, Sequence[Operand], Sequence[Value]]],
        gathered: int = 0,
    ) -> tuple[Value, ...]:
        """Repeat `step(number, *carried)`, which gives whether to go on, what to carry, and what to gather.

        Args:
            limit: the most repetitions, () int64; None: no limit.
            carried: at the first.
            step: writes one repetition down.
            gathered: how many values of each repetition are stacked along a new first axis.

        Returns:
            What was carried at last, then what was gathered.
        """
        starts = [self.value(each) for each in carried]
        names = [self._fresh("carried") for _ in starts]
        number, go_on = self._fresh("number"), self._fresh("go_on")
        self._scopes.append([])
        again, ends, rows = step(Value(number, self), *(Value(name, self) for name in names))
        ends = self._made_here([again, *ends, *rows])
        inputs = [Port(number, "int64", ()), Port(go_on, "bool", ()), *map(Port, names)]
        body = Body(self._fresh("body"), self._scopes.pop(), inputs, [Port(value.name) for value in ends])
        found = self.Loop(limit, True, *starts, outputs=len(starts) + gathered, body=body)
        return found if isinstance(found, tuple) else (found,)

    def encode(self, metadata: dict[str, str]) -> bytes:
        """The bytes of an .onnx file."""
        body = Body(self.name, self._scopes[0], self._inputs, self._outputs, self._initialisers)
        return encode_model(body, metadata, self._domains)
