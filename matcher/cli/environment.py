"""`matcher env`."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import matcher
from matcher.cli.messages import show

VARIABLES = {
    "MATCHER_DATA": "Folder with photos/ and bench/, which `train` and `evaluate` use; ../shared if not set.",
    "MATCHER_CACHE": "Folder for fetched weights, compiled kernels and views rendered for training.",
    "MATCHER_OFFLINE": "1: never use the network; `weights fetch` refuses at once.",
    "MATCHER_COMPILED": "0: compute without the compiled kernels.",
    "MATCHER_DEBUG": "1: print the traceback of every error.",
    "MATCHER_VENV": "Folder of the virtual environment that the demo and the tests make; .venv if not set.",
    "MATCHER_LIGHTGLUE_CODE": "File of the published LightGlue, with which a test compares ours.",
    "MATCHER_SUPERGLUE_CODE": "File of the published SuperGlue, with which a test compares ours.",
    "OMP_NUM_THREADS": "Threads of the processor that a command may use; all cores if not set.",
}
_PACKAGES = (
    "torch", "numpy", "opencv-python-headless", "kornia", "pillow", "poselib", "safetensors",
    "pycolmap", "h5py", "pillow-heif", "ray", "rerun-sdk", "gradio",
)  # fmt: skip


def environment() -> None:
    """Print versions, what this machine offers, and the environment variables with their values.

    Please add this output to a bug report.
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
            show(f"{'':<{width}}  now {os.environ[name]!r}")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _machine() -> list[str]:
    """Device, precision and kernels that `auto` chooses."""
    import torch

    from matcher.kernels import kernels
    from matcher.loading import resolve_device
    from matcher.match.network.inference import resolve_precision

    device = resolve_device("auto")
    name = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "processor"
    )
    return [
        f"device: {device} ({name}), {torch.get_num_threads()} threads, "
        f"precision auto is {resolve_precision('auto', device)}",
        "kernels: compiled"
        if kernels() is not None
        else "kernels: none; `python scripts/build_kernels.py` makes them",
    ]
