"""Reverse-mode automatic differentiation in NumPy (Linnainmaa 1970), enough of it to train a transformer.

    python -m triptych_lectures.scratch.numpy_autograd FILE.txt      trains the decoder of numpy_transformer.py

`numpy_transformer.py` has a backward that was written by hand.  Here its `forward` is called with `Tracked` arrays.
They compute what NumPy would and keep, for each array they were made from, a function from dL/d(the result) to
dL/d(that one), where L is the loss.  `backward` calls these from the last array to the first, and adds up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from triptych_lectures.scratch.numpy_transformer import Array, Config, Weights, forward, main

Gradient = Callable[[Array], Array]  # dL/dy [shape of y] -> dL/dx [shape of x, before broadcasting]


class Tracked(NDArrayOperatorsMixin):
    """An array that remembers what it was made from: NumPy's functions and operators take it as they take an array.

    parents   the values it was made from, each with its gradient function.
    grad      dL/d(this), the shape of `data`, after `backward` of the value L.
    """

    def __init__(self, data: Any, parents: Sequence[tuple[Tracked, Gradient]] = ()) -> None:
        self.data: Array = np.asarray(data)
        self.parents, self.grad = parents, np.zeros_like(self.data)
        self.shape = self.data.shape

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Tracked:
        """`a + b`, `np.exp(a)` and the like: the functions of RULES."""
        if ufunc not in RULES or method != "__call__" or options:
            raise TypeError(f"numpy.{ufunc.__name__} has no rule here; add its gradients to RULES")
        arrays = [data_of(x) for x in inputs]
        y = ufunc(*arrays)
        gradients = RULES[ufunc](y, *arrays)
        return Tracked(y, [(x, g) for x, g in zip(inputs, gradients, strict=True) if isinstance(x, Tracked)])

    def __array_function__(self, function: Any, types: Any, inputs: Any, options: Any) -> Tracked:
        """`np.where(condition, a, b)` and `np.concatenate([a, b], axis)`."""
        if function is np.where:
            condition, *pair = inputs
            gradients = (lambda d: np.where(condition, d, 0.0)), (lambda d: np.where(condition, 0.0, d))
            y = np.where(condition, *[data_of(x) for x in pair])
            return Tracked(y, [(x, g) for x, g in zip(pair, gradients, strict=True) if isinstance(x, Tracked)])
        if function is np.concatenate:
            pieces, axis = inputs
            y = np.concatenate([piece.data for piece in pieces], axis)
            ends = np.cumsum([piece.shape[axis] for piece in pieces])
            cut = [lambda d, i=i: np.split(d, ends[:-1], axis)[i] for i in range(len(pieces))]
            return Tracked(y, list(zip(pieces, cut, strict=True)))
        raise TypeError(f"numpy.{function.__name__} has no rule here; add it to Tracked.__array_function__")

    def sum(self, axis: Any = None, keepdims: bool = False) -> Tracked:
        y = self.data.sum(axis, keepdims=True)  # every number of x has the gradient of its sum
        return Tracked(y if keepdims else self.data.sum(axis), [(self, lambda d: self._spread(d, y))])

    def mean(self, axis: Any = None, keepdims: bool = False) -> Tracked:
        total = self.sum(axis, keepdims)
        return cast(Tracked, total * (total.data.size / self.data.size))

    def max(self, axis: Any = None, keepdims: bool = False) -> Tracked:
        y = self.data.max(axis, keepdims=True)
        largest = self.data == y  # where several are, they share the gradient
        share = largest / largest.sum(axis, keepdims=True)
        return Tracked(y if keepdims else self.data.max(axis), [(self, lambda d: self._spread(d, y) * share)])

    def _spread(self, d: Array, reduced: Array) -> Array:
        """The gradient of a number that axes were reduced to, for each number of them; `reduced` has these axes."""
        return np.broadcast_to(d.reshape(reduced.shape), self.shape)

    def reshape(self, *shape: int) -> Tracked:
        return Tracked(self.data.reshape(*shape), [(self, lambda d: d.reshape(self.shape))])

    def swapaxes(self, one: int, other: int) -> Tracked:
        return Tracked(self.data.swapaxes(one, other), [(self, lambda d: d.swapaxes(one, other))])

    @property
    def T(self) -> Tracked:
        return Tracked(self.data.T, [(self, lambda d: d.T)])

    def __getitem__(self, index: Any) -> Tracked:
        def put(d: Array) -> Array:
            whole = np.zeros_like(self.data)
            np.add.at(whole, index, d)  # a number that was taken twice gets both gradients
            return whole

        return Tracked(self.data[index], [(self, put)])

    def backward(self) -> None:
        """Set `grad` of every value that this one, a single number, was made from."""
        order, visited, waiting = list[Tracked](), set[int](), [(self, False)]
        while waiting:  # depth first: a value comes after all that it was made from
            value, ready = waiting.pop()
            if ready:
                order.append(value)
            elif id(value) not in visited:
                visited.add(id(value))
                waiting += [(value, True), *[(parent, False) for parent, _ in value.parents]]
        for value in order:
            value.grad = np.zeros_like(value.data)
        self.grad = np.ones_like(self.data)
        for value in reversed(order):
            for parent, gradient in value.parents:
                parent.grad = parent.grad + unbroadcast(gradient(value.grad), parent.shape)


def data_of(x: Any) -> Array:
    return x.data if isinstance(x, Tracked) else np.asarray(x)


def unbroadcast(d: Array, shape: tuple[int, ...]) -> Array:
    """A number that was repeated along an axis gets the sum of the gradients there."""
    d = np.sum(d, tuple(range(d.ndim - len(shape))))
    return np.asarray(np.sum(d, tuple(i for i, n in enumerate(shape) if n < d.shape[i]), keepdims=True))


# y = f(a, b) -> dL/da and dL/db, as functions of d = dL/dy
RULES: dict[np.ufunc, Callable[..., Sequence[Gradient]]] = {
    np.add: lambda y, a, b: (lambda d: d, lambda d: d),
    np.subtract: lambda y, a, b: (lambda d: d, lambda d: -d),
    np.multiply: lambda y, a, b: (lambda d: d * b, lambda d: d * a),
    np.divide: lambda y, a, b: (lambda d: d / b, lambda d: -d * y / b),
    np.matmul: lambda y, a, b: (lambda d: d @ b.swapaxes(-1, -2), lambda d: a.swapaxes(-1, -2) @ d),
    np.negative: lambda y, a: (lambda d: -d,),
    np.sqrt: lambda y, a: (lambda d: d / (2 * y),),
    np.exp: lambda y, a: (lambda d: d * y,),
    np.log: lambda y, a: (lambda d: d / a,),
}


def gradients(w: Weights, ids: Array, targets: Array, c: Config) -> tuple[float, Weights]:
    """As `numpy_transformer.gradients`: the mean loss in nats a token, and its gradient for every weight."""
    values = {name: Tracked(array) for name, array in w.items()}
    logits = cast(Tracked, forward(cast(Weights, values), ids, c)[0])  # [B, T, V]
    s = logits - logits.max(-1, keepdims=True)
    log_p = s - np.log(np.exp(s).sum(-1, keepdims=True))
    rows, columns = np.indices(targets.shape)
    loss = -log_p[rows, columns, targets].mean()
    loss.backward()
    return float(loss.data), {name: value.grad for name, value in values.items()}


if __name__ == "__main__":
    main(gradients=gradients)
