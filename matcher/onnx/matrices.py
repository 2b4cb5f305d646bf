"""Small matrices as ONNX operations, which have no inverse: any number of them at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from matcher.onnx.builder import Builder, Value
from matcher.refine import MAX_DAMPING

_TINY, _EPSILON = 1e-30, 1e-12


class Square(NamedTuple):
    """The entries of matrices (K, 2, 2), (K,) each."""

    a: Value
    b: Value
    c: Value
    d: Value

    @staticmethod
    def of(g: Builder, matrices: Value) -> Square:
        """The entries [[a, b], [c, d]]."""
        flat = g.Reshape(matrices, [-1, 4])
        return Square(*(g.entry(flat, k, axis=1) for k in range(4)))

    def stacked(self) -> Value:
        """(K, 2, 2)."""
        g = self.a.graph
        return g.Reshape(g.Concat(*(g.Unsqueeze(x, [1]) for x in self), axis=1), [-1, 2, 2])

    def scaled(self, factor: Value) -> Square:
        """Times (K,) factors."""
        return Square(*(x * factor for x in self))

    def times(self, other: Square) -> Square:
        """The product."""
        a, b, c, d = self
        return Square(
            a * other.a + b * other.c,
            a * other.b + b * other.d,
            c * other.a + d * other.c,
            c * other.b + d * other.d,
        )

    def transposed(self) -> Square:
        """Rows as columns."""
        return Square(self.a, self.c, self.b, self.d)

    def determinant(self) -> Value:
        """(K,)."""
        return self.a * self.d - self.b * self.c

    def zoom(self) -> Value:
        """(K,) scale: the geometric mean of the singular values."""
        g = self.a.graph
        return g.Sqrt(g.Abs(self.determinant()))

    def inverse(self) -> Square:
        """Of matrices that have one."""
        one = 1.0 / self.determinant()
        return Square(self.d * one, -self.b * one, -self.c * one, self.a * one)

    def square_root(self) -> Square:
        """Of symmetric positive definite matrices."""
        g, product = self.a.graph, self.zoom()  # of the two roots of its eigenvalues
        both = 1.0 / g.Sqrt(self.a + self.d + product * 2.0)
        return Square((self.a + product) * both, self.b * both, self.c * both, (self.d + product) * both)


def inverse_of_3(g: Builder, matrices: Value) -> Value:
    """Inverses of symmetric positive definite matrices (K, 3, 3) of float64, by cofactors."""
    following, after = np.array([1, 2, 0]), np.array([2, 0, 1])

    def turned(rows: np.ndarray, columns: np.ndarray) -> Value:
        return g.Gather(g.Gather(matrices, rows, axis=1), columns, axis=2)

    cofactors = turned(following, following) * turned(after, after)
    cofactors = cofactors - turned(following, after) * turned(after, following)
    determinant = g.ReduceSum(g.slice(matrices * cofactors, 1, 0, 1), [1, 2])
    return cofactors / g.Max(determinant, g.double(g.value(_TINY)))


def inverse_of_6(g: Builder, matrices: Value) -> Value:
    """Inverses of symmetric positive definite matrices (K, 6, 6), by blocks; computed in float64.

    Nothing is transposed, because ONNX Runtime 1.17 joins that with products and has no such one of float64.
    """
    x = g.double(matrices)
    top, bottom = g.slice(x, 1, 0, 3), g.slice(x, 1, 3)
    first, side, below = inverse_of_3(g, g.slice(top, 2, 0, 3)), g.slice(top, 2, 3), g.slice(bottom, 2, 0, 3)
    across, back = first @ side, below @ first
    last = inverse_of_3(g, g.slice(bottom, 2, 3) - below @ across)
    upper = g.Concat(first + across @ last @ back, -(across @ last), axis=2)
    lower = g.Concat(-(last @ back), last, axis=2)
    return g.real(g.Concat(upper, lower, axis=1))


def weakest_direction(structure: Square, noise: Value) -> tuple[Square, Value]:
    """Projections on the weakest eigenvectors of structure tensors, and (K,) the damping along them.

    See `matcher.refine`; `noise` (K,) is the eigenvalue that noise alone causes.
    """
    g, (xx, xy, _, yy) = structure.a.graph, structure
    across, twice = xx - yy, xy * 2.0
    length = g.Sqrt(across * across + twice * twice)
    one = 0.5 / g.Max(length, _EPSILON)
    across, twice = across * one, twice * one
    eigenvalue = (xx + yy - length) * 0.5
    ratio = noise / g.Max(eigenvalue - noise, _EPSILON)
    damping = g.Min(g.Max(eigenvalue * ratio * ratio, 0.0), MAX_DAMPING)
    return Square(0.5 - across, -twice, -twice, across + 0.5), damping


def on_diagonal() -> np.ndarray:
    """(6, 36) from six numbers to the diagonal of a matrix."""
    places = np.zeros((6, 6, 6), np.float32)
    places[range(6), range(6), range(6)] = 1
    return places.reshape(6, 36)


def on_shift() -> np.ndarray:
    """(4, 36) from the entries for shift along x and y to the matrix of all unknowns."""
    places = np.zeros((4, 6, 6), np.float32)
    for entry, (row, column) in enumerate([(0, 0), (0, 3), (3, 0), (3, 3)]):
        places[entry, row, column] = 1
    return places.reshape(4, 36)
