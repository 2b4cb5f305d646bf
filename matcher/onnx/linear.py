"""Linear maps in the numbers that a file is written in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from matcher.onnx.builder import Builder, Value

Numbers = Literal["float32", "float16", "int8"]


@dataclass(frozen=True)
class Linear:
    """Writes x weightᵀ + bias.

    - `float32`: as it is.
    - `float16`: weights take half the space and are widened once, when a runtime loads the file.
    - `int8`: weights take a quarter; they have one scale per output, tokens one per call, found there
      ("dynamic quantisation").
    """

    graph: Builder
    numbers: Numbers

    def __call__(self, name: str, x: Value, weight: np.ndarray, bias: np.ndarray) -> Value:
        """x (…, inputs) → (…, outputs), for weight (outputs, inputs) and bias (outputs,)."""
        g = self.graph
        if self.numbers == "int8":
            return self._quantised(name, x, weight) + bias
        return x @ stored(g, f"{name}.weight", weight.T, self.numbers) + bias

    def _quantised(self, name: str, x: Value, weight: np.ndarray) -> Value:
        g = self.graph
        scale = np.maximum(np.abs(weight).max(axis=1), 1e-12) / 127
        whole = np.rint(weight / scale[:, None]).astype(np.int8)
        y, factor, zero = g.DynamicQuantizeLinear(x, outputs=3)
        product = g.MatMulInteger(y, g.weight(f"{name}.weight", np.ascontiguousarray(whole.T)), zero)
        return g.real(product) * (factor * scale.astype(np.float32))


def stored(graph: Builder, name: str, array: np.ndarray, numbers: Numbers) -> Value:
    """A named array as float32, kept in half precision unless `numbers` is float32."""
    if numbers == "float32":
        return graph.weight(name, np.ascontiguousarray(array, np.float32))
    return graph.real(graph.weight(name, np.ascontiguousarray(array, np.float16)))
