"""`matcher env`."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import matcher
from matcher.cli.messages import show

VARIABLES = {
    "MATCHER_DATA": "Folder with photos/ and bench/ for `train` and `evaluate`; ../shared if not set.",
    "MATCHER_CACHE": "Folder for downloaded weights, compiled kernels and rendered training views.",
    "MATCHER_OFFLINE": "1: never use the network; `weights fetch` fails at once.",
    "MATCHER_COMPILED": "0: do not use the compiled kernels; a target such as avx2: use those of it.",
    "MATCHER_DEBUG": "1: print the traceback of every error.",
    "MATCHER_VENV": "Virtual environment that scripts/demo.py and run_tests.py create; .venv if not set.",
    "MATCHER_LIGHTGLUE_CODE": "Source file of the published LightGlue, to compare with in tests.",
    "MATCHER_SUPERGLUE_CODE": "Source file of the published SuperGlue, to compare with in tests.",
    "OMP_NUM_THREADS": "Number of CPU threads; all cores if not set.",
}
_PACKAGES = (
    "torch", "numpy", "opencv-python-headless", "kornia", "pillow", "poselib", "safetensors",
    "pycolmap", "h5py", "pillow-heif", "ray", "rerun-sdk", "gradio",
)  # fmt: skip


def environment() -> None:
    """Print versions, the device and kernels in use, and the environment variables with their values.

    Please include this output in bug reports.
    """
    from matcher.files import cache_folder

    show(f"matcher {matcher.__version__}, Python {platform.python_version()}, {platform.platform()}")
    show(", ".join(f"{name} {_version(name)}" for name in _PACKAGES))
    for line in _machine():
        show(line)
    show(f"cache: {cache_folder()}\n")
    width = max(map(len, VARIABLES))
    for name, meaning in VARIABLES.items():
        show(f"{name:<{width}}  {meaning}")
        if name in os.environ:
            show(f"{'':<{width}}  set to {os.environ[name]!r}")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _machine() -> list[str]:
    """Device, precision and kernels that `auto` chooses."""
    import torch

    from matcher.kernels import kernels
    from matcher.kernels.library import library_in_use
    from matcher.match.network.inference import resolve_precision
    from matcher.torch_engine import resolve_device

    device = resolve_device("auto")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
    return [
        f"device: {device} ({name}), {torch.get_num_threads()} threads, "
        f"precision auto is {resolve_precision('auto', device)}",
        f"kernels: compiled for {library_in_use().split('-')[0]}"
        if kernels() is not None
        else "kernels: not compiled; run `python scripts/build_kernels.py`",
    ]
