"""A CUDA or Metal device that is simulated on the processor, with a count of the waits for it.

Its tensors say that they are on `cuda:0` or `mps:0`; their numbers lie in tensors of the processor. So
whatever depends on the device's type goes the way that it goes there, tensors of two devices in one operation
are an error, as are float64 numbers on Metal, and every step for which a program waits for its GPU is
counted. No kernel of a GPU is simulated: rounding, memory and time are not known here.

For torch's own C++ the tensors are on the device "meta", which needs no driver.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    return_and_correct_aliasing,
)

from matcher.match.steering import turned_orientations, upright_maps
from matcher.train.views import constant

_device = torch.device("cuda", 0)
META, CPU = torch.device("meta"), torch.device("cpu")
aten = torch.ops.aten

# Operations whose result, or its size, the program reads from the device.
_READS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten.repeat_interleave.Tensor,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
    aten.is_nonzero.default,
}
_WRITES_BY_INDEX = {aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
_INDEXING = {aten.index.Tensor, *_WRITES_BY_INDEX}


class Waits:
    """How often the program waited for the device, by the line of the package that did."""

    def __init__(self) -> None:
        self.reads: Counter[str] = Counter()
        self.uploads: Counter[str] = Counter()  # the device is not waited for
        self.kernels = 0

    def __len__(self) -> int:
        return self.reads.total()

    def __repr__(self) -> str:
        return "\n".join(f"{count} × {line}" for line, count in self.reads.most_common()) or "no waits"


_counting: list[Waits] = []


def _line() -> str:
    stack = traceback.extract_stack()
    frames = [frame for frame in stack if "/matcher/" in frame.filename] or stack[-2:]
    return f"{frames[-1].filename.rsplit('/matcher/', 1)[-1]}:{frames[-1].lineno} {frames[-1].line}"


def _count(kind: str) -> None:
    if SimulatedGraph.capturing is not None:
        raise RuntimeError(f"operation not permitted when stream is capturing: {_line()}")
    for waits in _counting:
        getattr(waits, kind)[_line()] += 1


class OnDevice(torch.Tensor):
    """A tensor on the simulated device."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, requires_grad: bool = False) -> OnDevice:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=META,
            requires_grad=requires_grad,
        )
        made.inner = inner
        return made

    device = property(lambda self: _device)
    is_cuda = property(lambda self: _device.type == "cuda")
    is_mps = property(lambda self: _device.type == "mps")
    is_cpu = property(lambda self: False)
    is_meta = property(lambda self: False)

    def __repr__(self) -> str:
        return f"OnDevice({self.inner!r})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})

    def __deepcopy__(self, memo) -> torch.Tensor:
        made = OnDevice(self.inner.clone())
        if isinstance(self, torch.nn.Parameter):
            return torch.nn.Parameter(made, self.requires_grad)
        return made.requires_grad_(self.requires_grad)

    def tolist(self) -> list:
        _count("reads")
        return self.inner.tolist()

    def numpy(self, **_) -> None:
        raise TypeError(f"can't convert {_device} device type tensor to numpy. Use Tensor.cpu() first")

    __array__ = numpy

    def pin_memory(self) -> None:
        raise RuntimeError(f"cannot pin memory of a tensor on {_device}")

    def data_ptr(self) -> int:
        raise RuntimeError(f"the address of a tensor on {_device} was taken for a kernel of the processor")


def _mapped(change, value):
    """A value, or what lists, tuples and dictionaries hold, changed."""
    if isinstance(value, (list, tuple)):
        made = [_mapped(change, each) for each in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if isinstance(value, dict):
        return {key: _mapped(change, each) for key, each in value.items()}
    return change(value)


def _tensors(value) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _mapped(lambda each: found.append(each) if isinstance(each, torch.Tensor) else None, value)
    return found


def _inner(value):
    return value.inner if isinstance(value, OnDevice) else value


def _outer(value):
    return OnDevice(value) if isinstance(value, torch.Tensor) else value


def _run(func, args, kwargs):
    """An operation of torch where some tensors are on the device."""
    tensors = _tensors((args, kwargs))
    if not tensors and kwargs.get("device") is None:
        return func(*args, **kwargs)
    ours = [value for value in tensors if isinstance(value, OnDevice)]
    strangers = [value for value in tensors if not isinstance(value, OnDevice) and value.dim()]
    device, moves = kwargs.get("device"), func in (aten._to_copy.default, aten.copy_.default)
    there = bool(ours) if device is None else torch.device(device).type == "meta"
    if func is aten.copy_.default:
        there = isinstance(args[0], OnDevice)
    if moves:
        if len(ours) + len(strangers) == 2 - (func is aten._to_copy.default) and bool(ours) and not there:
            _count("reads")
        elif there and (strangers or not ours):
            _count("uploads")
    elif ours and strangers:
        if func not in _INDEXING:
            raise RuntimeError(f"{func}: tensors on {_device} and on the CPU in one operation: {_line()}")
        _count("uploads")
    if ours and (func in _READS or (func in _INDEXING and _by_mask(func, args))):
        _count("reads")
    for waits in _counting:
        waits.kernels += bool(ours)
    inner_args, inner_kwargs = _mapped(_inner, (args, dict(kwargs)))
    if device is not None:
        inner_kwargs["device"] = CPU
    graph = SimulatedGraph.capturing
    if graph is not None and there:
        found = graph.record(func, inner_args, inner_kwargs)
    else:
        found = func(*inner_args, **inner_kwargs)
    made = _tensors(found) if there else []
    if _device.type == "mps" and any(t.dtype == torch.float64 for t in made + [t.inner for t in ours]):
        raise TypeError(f"the MPS framework doesn't support float64: {_line()}")
    if func is aten._local_scalar_dense.default:
        return found
    if func is aten.copy_.default:
        return args[0]
    if not there:
        return found.clone() if moves and found is inner_args[0] else found
    if func is aten._to_copy.default:
        return OnDevice(found.clone() if found is inner_args[0] else found)
    wrapped = _mapped(_outer, found)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if ours else wrapped


def _by_mask(func, args) -> bool:
    """Whether an index is a mask; what it masks is filled with one number without a wait."""
    masks = [i for i in args[1] if isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8)]
    return bool(masks) and (func not in _WRITES_BY_INDEX or args[2].numel() > 1)


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class _Devices(TorchFunctionMode):
    """`device="cuda"`, or "mps", is the simulated device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is torch.device:
            return func(*args, **kwargs)
        if name in ("tensor", "as_tensor", "new_tensor") and _is_there(kwargs.get("device", args[0])):
            data = args[1] if name == "new_tensor" else args[0]
            if not isinstance(data, torch.Tensor):
                kind = kwargs.get("dtype", args[0].dtype if name == "new_tensor" else None)
                return torch.tensor(data, dtype=kind).to(META)
        if name == "scaled_dot_product_attention":
            return _attention(*args, **kwargs)
        if name == "tolist" and isinstance(args[0], OnDevice):
            return OnDevice.tolist(args[0])
        if func is torch.Tensor.to and isinstance(args[1] if len(args) > 1 else None, torch.Tensor):
            args = (args[0], args[1].device, args[1].dtype)
        kwargs.pop("pin_memory", None)
        if "device" in kwargs or func is torch.Tensor.to:
            args, kwargs = _mapped(_renamed, (args, kwargs))
        return func(*args, **kwargs)


def _is_there(value) -> bool:
    if isinstance(value, OnDevice):
        return True
    return isinstance(value, (str, torch.device)) and str(value).startswith(_device.type)


def _renamed(value):
    return META if isinstance(value, (str, torch.device)) and _is_there(value) else value


def _attention(q, k, v, attn_mask=None, **_):
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    scores = scores if attn_mask is None else scores + attn_mask.float()
    return scores.softmax(-1).to(v.dtype) @ v


class SimulatedGraph:
    """What a stage did, done again on the same memory; as on a GPU nothing is done while it is captured."""

    capturing: SimulatedGraph | None = None

    def __init__(self) -> None:
        self.steps: list[tuple] = []
        self._before: dict[int, tuple] = {}
        self._made: list[torch.Tensor] = []

    def pool(self) -> tuple[int, int]:
        return (0, 1)

    def record(self, func, args, kwargs) -> object:
        """Do one step, and keep it."""
        ours = {tensor.untyped_storage().data_ptr() for tensor in self._made}
        for tensor in _tensors((args, kwargs)) if func._schema.is_mutable else ():
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in ours:
                self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        found = func(*args, **kwargs)
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        self._made += [t for t in _tensors(found) if t.untyped_storage().data_ptr() not in given]
        self.steps.append((func, args, kwargs, found))
        return found

    def restore(self) -> None:
        """Undo what was done while it was captured."""
        for storage, before in self._before.values():
            storage.copy_(before)

    def replay(self) -> None:
        for func, args, kwargs, found in self.steps:
            again = func(*args, **kwargs)
            for new, old in zip(_tensors(again), _tensors(found), strict=True):
                if new.data_ptr() != old.data_ptr():
                    old.copy_(new)


class SimulatedStream:
    """A stream, of which only the device is known."""

    def __init__(self, device=None) -> None:
        self.device = device


captures: list[tuple[object, object, str]] = []  # current device, device of the stream, mode of each capture
_current: list[object] = []


@contextmanager
def _current_device(device) -> Iterator[None]:
    _current.append(device)
    try:
        yield
    finally:
        _current.pop()


@contextmanager
def _captured(
    graph: SimulatedGraph, pool: object = None, stream=None, capture_error_mode: str = "global"
) -> Iterator[None]:
    on = None if stream is None else stream.device
    captures.append((_current[-1] if _current else None, on, capture_error_mode))
    SimulatedGraph.capturing = graph
    try:
        yield
    finally:
        SimulatedGraph.capturing = None
        graph.restore()


class SimulatedEvent:
    """An event that is over once it was asked for some times: a device lags behind the program."""

    late = 0  # questions that are answered with no

    def __init__(self, **_) -> None:
        self.asked = 0

    def record(self, stream=None) -> None:
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        return self.asked > self.late

    def synchronize(self) -> None:
        _count("reads")


class SimulatedGenerator(torch.Generator):
    """Random numbers of the processor."""

    def __new__(cls, device=None) -> SimulatedGenerator:
        return super().__new__(cls)


def _no_grad(mode: torch.inference_mode) -> torch.no_grad:
    return mode.__dict__.setdefault("_instead", torch.no_grad())


@contextmanager
def simulated_gpu(kind: str = "cuda") -> Iterator[None]:
    """The device, "cuda" or "mps", is there, and torch says so."""
    with pytest.MonkeyPatch.context() as patch, _Devices(), _Dispatch():
        # In inference mode operations that are made of others are not taken apart, and reads are not seen.
        patch.setattr(torch.inference_mode, "__enter__", lambda self: self.without.__enter__())
        patch.setattr(torch.inference_mode, "__exit__", lambda self, *error: self.without.__exit__(*error))
        patch.setattr(torch.inference_mode, "without", property(_no_grad), raising=False)
        # A parameter that changes its type becomes a new one: `inner` would not follow.
        patch.setattr(torch.__future__, "get_overwrite_module_params_on_conversion", lambda: True)
        patch.setattr(torch, "Generator", SimulatedGenerator)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor)
        (_as_metal if kind == "mps" else _as_cuda)(patch)
        try:
            yield
        finally:
            for kept in (upright_maps, turned_orientations, constant):
                kept.cache_clear()  # a real device has none of them


def _as_metal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys.modules[__name__], "_device", torch.device("mps", 0))
    patch.setattr(torch.backends.mps, "is_available", lambda: True)


def _as_cuda(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: 1)
    patch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    patch.setattr(torch.cuda, "Event", SimulatedEvent)
    patch.setattr(torch.cuda, "CUDAGraph", SimulatedGraph)
    patch.setattr(torch.cuda, "graph", _captured)
    patch.setattr(torch.cuda, "Stream", SimulatedStream)
    patch.setattr(torch.cuda, "device", _current_device)
    patch.setattr(torch.cuda, "current_stream", lambda device=None: None)
    for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
        patch.setattr(torch.cuda, name, lambda device=None: 0)
    patch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    patch.setattr(torch.cuda, "empty_cache", lambda: None)
    patch.setattr(torch.cuda, "get_device_name", lambda device=None: "simulated")


@contextmanager
def on_cpu() -> Iterator[None]:
    """Without the simulation, which makes what runs on the processor slow as well."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


@contextmanager
def waits() -> Iterator[Waits]:
    """Counts the waits of what is done within, on a real device by the warnings of torch."""
    found = Waits()
    _counting.append(found)
    real = torch.backends.cuda.is_built() and torch.cuda.is_available()
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            if real:
                torch.cuda.set_sync_debug_mode("warn")
            yield found
        for one in told:
            if "synchronizing CUDA operation" in str(one.message):
                found.reads[f"{one.filename}:{one.lineno}"] += 1
    finally:
        if real:
            torch.cuda.set_sync_debug_mode("default")
        _counting.remove(found)


@pytest.fixture(params=["simulated", pytest.param("real", marks=pytest.mark.gpu)])
def gpu(request) -> Iterator[str]:
    """Whether the device "cuda" is simulated or real: every test that asks for it is run on both."""
    if request.param == "real":
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        yield request.param
    else:
        with simulated_gpu():
            yield request.param
