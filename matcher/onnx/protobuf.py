"""ONNX files as bytes: the few messages of the format that our graphs need, in protobuf's encoding.

Field numbers are those of `onnx.proto` (IR version 9, operator set 20), which is all that it takes to write a
model; neither torch nor the package onnx is needed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from matcher.files import MARK

IR_VERSION = 9
OPERATORS = 20  # version of the operator set
_TYPES = {
    "float32": 1,
    "uint8": 2,
    "int8": 3,
    "int32": 6,
    "int64": 7,
    "bool": 9,
    "float16": 10,
}


@dataclass(frozen=True)
class Node:
    """One operation; an attribute may be a number, a text, a list of numbers, an array or a `Body`."""

    operator: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    attributes: dict[str, Any] = field(default_factory=dict)
    domain: str = ""  # of the operator; ONNX's own when empty


@dataclass(frozen=True)
class Port:
    """An input or output of a graph; a dimension is a number or, if it varies, a name."""

    name: str
    dtype: str = ""  # empty where it follows from the graph, as in the branches of an If
    shape: tuple[int | str, ...] | None = None


@dataclass(frozen=True)
class Body:
    """A graph: that of a model, of a loop or of a branch."""

    name: str
    nodes: Sequence[Node]
    inputs: Sequence[Port]
    outputs: Sequence[Port]
    initialisers: dict[str, np.ndarray] = field(default_factory=dict)


def encode_model(body: Body, metadata: dict[str, str], domains: dict[str, int]) -> bytes:
    """The bytes of an .onnx file.

    Args:
        body: the model's graph.
        metadata: read back by `InferenceSession.get_modelmeta().custom_metadata_map`.
        domains: versions of further operator sets, by their domain.
    """
    versions = {"": OPERATORS, **domains}
    return b"".join(
        [
            _number(1, IR_VERSION),
            _text(2, "matcher"),
            _text(6, MARK.decode()),
            _part(7, _body(body)),
            *(_part(8, _text(1, domain) + _number(2, number)) for domain, number in versions.items()),
            *(_part(14, _text(1, key) + _text(2, value)) for key, value in metadata.items()),
        ]
    )


def _body(body: Body) -> bytes:
    return b"".join(
        [
            *(_part(1, _node(node)) for node in body.nodes),
            _text(2, body.name),
            *(_part(5, _tensor(array, name)) for name, array in body.initialisers.items()),
            *(_part(11, _port(port)) for port in body.inputs),
            *(_part(12, _port(port)) for port in body.outputs),
        ]
    )


def _node(node: Node) -> bytes:
    attributes = (_part(5, _attribute(name, value)) for name, value in node.attributes.items())
    return b"".join(
        [
            *(_text(1, name) for name in node.inputs),
            *(_text(2, name) for name in node.outputs),
            _text(4, node.operator),
            *attributes,
            _text(7, node.domain) if node.domain else b"",
        ]
    )


def _attribute(name: str, value: Any) -> bytes:
    head = _text(1, name)
    if isinstance(value, Body):
        return head + _part(6, _body(value)) + _number(20, 5)
    if isinstance(value, np.ndarray):
        return head + _part(5, _tensor(value, "")) + _number(20, 4)
    if isinstance(value, str):
        return head + _text(4, value) + _number(20, 3)
    if isinstance(value, float):
        return head + _key(2, 5) + struct.pack("<f", value) + _number(20, 1)
    if isinstance(value, int):
        return head + _number(3, value) + _number(20, 2)
    return head + b"".join(_number(8, number) for number in value) + _number(20, 7)


def _tensor(array: np.ndarray, name: str) -> bytes:
    dims = b"".join(_number(1, side) for side in array.shape)
    raw = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False)).tobytes()
    return dims + _number(2, _TYPES[array.dtype.name]) + _text(8, name) + _part(9, raw)


def _port(port: Port) -> bytes:
    if not port.dtype:
        return _text(1, port.name)
    shape = b""
    if port.shape is not None:
        shape = _part(2, b"".join(_part(1, _dimension(side)) for side in port.shape))
    return _text(1, port.name) + _part(2, _part(1, _number(1, _TYPES[port.dtype]) + shape))


def _dimension(side: int | str) -> bytes:
    return _text(2, side) if isinstance(side, str) else _number(1, side)


def _key(number: int, wire: int) -> bytes:
    return _varint(number << 3 | wire)


def _number(number: int, value: int) -> bytes:
    return _key(number, 0) + _varint(value)


def _text(number: int, value: str) -> bytes:
    return _part(number, value.encode())


def _part(number: int, data: bytes) -> bytes:
    return _key(number, 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # negative numbers are those of 64 bits in two's complement
    return bytes(_sevens(value))


def _sevens(value: int) -> Iterable[int]:
    while value > 127:
        yield value & 127 | 128
        value >>= 7
    yield value
