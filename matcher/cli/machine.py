"""Commands about what is installed: `weights`, `presets`, `env`, `serve`."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal

import typer

import matcher
from matcher.cli.options import Overwrite, complete_preset, of_preset, option
from matcher.cli.output import complain, show, wants_progress
from matcher.errors import (
    CPU_BUILD,
    CUDA_BUILD,
    IntegrityError,
    UsageError,
    install_command,
    unknown_name,
)


def list_weights() -> None:
    """List shipped and published weights: licence, size, source, and whether they are installed."""
    from matcher.weights.files import read_manifest
    from matcher.weights.published import read_catalogue

    show("Shipped with this package")
    try:
        shipped = read_manifest()
    except IntegrityError as error:
        show(f"  none: {error}")
        shipped = {}
    for row in shipped.values():
        show(f"{row.name}  {row.bytes / 1e6:.1f} MB  {row.licence}  preset {row.preset}")
        show(f"  file        {row.file}  sha256 {row.sha256}")
        show(f"  source      {row.source}")
        show(f"  trained on  {row.trained_on}")
        show(f"  measured    {' '.join(row.metrics.split())}")
    show("\nPublished by others and not shipped; download with `matcher weights fetch NAME`")
    for row in read_catalogue().values():
        here = "installed" if (row.folder / "manifest.toml").is_file() else "not installed"
        use = "yes" if row.commercial else "no"
        what = f"preset {row.preset}" if row.preset else "front end"
        show(f"{row.name}  {row.megabytes:.1f} MB  {what}  {here}  commercial use: {use}")
        show(f"  licence     {row.licence}")
        show(f"  source      {row.source} ({row.paper})")
        for file in row.files:
            pinned = f"{file.name} is pinned ({file.sha256_from}): {file.sha256}"
            unknown = "its first download needs --accept-unverified, later ones must be the same"
            show(f"  sha256      {pinned if file.sha256 else f'{file.name} is not pinned: {unknown}'}")
        if row.note:
            show(f"  note        {row.note}")


def verify_weights(
    names: Annotated[
        list[str] | None, typer.Argument(help="Weights to check; by default all that are installed.")
    ] = None,
) -> None:
    """Check weights files against their checksums; exit with code 5 if one is missing or damaged."""
    from matcher.weights.files import read_manifest, verify
    from matcher.weights.published import locate, read_catalogue

    rows, published = read_manifest(), read_catalogue()
    for name in names or ():
        if name not in rows and name not in published:
            raise UsageError(unknown_name("weights", name, rows | published))
    here = [row.name for row in published.values() if (row.folder / "manifest.toml").is_file()]
    chosen, failed = names or [*rows, *here], 0
    for name in chosen:
        try:
            show(f"ok       {name}  {verify(rows[name]).path if name in rows else locate(published[name])}")
        except IntegrityError as error:
            complain(f"damaged  {name}  {error}")
            failed += 1
    if failed:
        raise IntegrityError(f"{failed} of {len(chosen)} weights files are missing or damaged")


def fetch_weights(
    names: Annotated[list[str], typer.Argument(help="Names from `matcher weights list`.")],
    accept_licence: option(
        bool, "--accept-licence", help="Accept licences that do not allow commercial use."
    ) = False,
    accept_unverified: option(
        bool,
        "--accept-unverified",
        help="Accept files whose SHA-256 is not known; what comes first must come later too.",
    ) = False,
) -> None:
    """Download published weights to the cache (MATCHER_CACHE), verify and convert them."""
    from matcher.weights.download import fetch
    from matcher.weights.published import find_published

    def report(have: int, total: int) -> None:
        if sys.stderr.isatty() and wants_progress():
            share = f"{100 * have // total:3d} %" if total else ""
            sys.stderr.write(f"\r  {have / 1e6:8.1f} MB {share}{chr(10) if have == total else ''}")
            sys.stderr.flush()

    accepted = dict(accept_licence=accept_licence, accept_unverified=accept_unverified)
    for row in [find_published(name) for name in names]:
        show(f"{row.name}: {row.licence}; commercial use: {'yes' if row.commercial else 'no'}; {row.source}")
        found = fetch(row, **accepted, report=report)
        for file in row.files if found.sha256 else ():
            remark = "as expected" if file.sha256 else "not checked, since no expected value is known"
            show(f"  {file.name}  sha256 {found.sha256[file.name]} ({remark})")
        show(f"  {'converted' if found.sha256 else 'already installed'}  {found.path}")


def import_weights(
    files: Annotated[
        list[Path], typer.Argument(help="Published checkpoint, a .pth, .pt, .ckpt or .safetensors file.")
    ],
    preset: option(str, metavar="NAME", help="Preset or front end that the checkpoint belongs to."),
    output: option(
        Path | None,
        metavar="FILE.safetensors",
        help="File to create; by default in the cache, where the preset finds it.",
    ) = None,
    overwrite: Overwrite = False,
) -> None:
    """Convert a downloaded checkpoint into a weights file, without running any code in it."""
    from matcher.files import check_output
    from matcher.weights.download import import_files

    if output is not None:
        check_output(output, (".safetensors",), overwrite=overwrite)
    show(f"converted  {import_files(files, preset, output)}")


def export_weights(
    preset: Annotated[
        str, typer.Argument(metavar="PRESET", autocompletion=complete_preset, help="Whose networks.")
    ],
    onnx: option(Path, metavar="FOLDER", help="Folder to write the ONNX files to."),
    numbers: option(
        Literal["float32", "float16", "int8"],
        help="What weights are written in; float16 and int8 make smaller files.",
    ) = "float32",
    opencv: option(
        str | None,
        metavar="WxH",
        help="Write files for OpenCV's ALIKED and LightGlueMatcher instead, for images of this size.",
    ) = None,
    colmap: option(bool, "--colmap", help="Write files for COLMAP's ALIKED and LightGlue instead.") = False,
    weights: of_preset("weights") = None,
    frontend_weights: of_preset("frontend_weights") = None,
    overwrite: Overwrite = False,
) -> None:
    """Write front end and matcher of a preset as ONNX files for other programs; takes minutes."""
    from matcher.presets import find_preset

    try:
        from matcher.export_onnx import export_preset
    except ModuleNotFoundError as error:
        raise UsageError(f"exporting needs {error.name}: {install_command('torch', 'onnxscript')}") from error

    config, given = find_preset(preset), {"weights": weights, "frontend_weights": frontend_weights}
    if opencv is not None and colmap:
        raise typer.BadParameter("--opencv and --colmap write different files; give one of them")
    if opencv is not None:
        if numbers != "float32" or any(given.values()):
            raise typer.BadParameter("--opencv writes the shipped weights in float32; leave the others out")
        width, _, height = opencv.partition("x")
        if not (width.isdecimal() and height.isdecimal()):
            raise typer.BadParameter(f"--opencv must be a size such as 640x480, not {opencv!r}")
        given["size"] = int(width), int(height)
    program = "opencv" if opencv is not None else "colmap" if colmap else "any"
    files = export_preset(preset, config, onnx, program, numbers=numbers, overwrite=overwrite, **given)
    for file in files:
        show(f"written  {file}  {file.stat().st_size / 1e6:.1f} MB")


WEIGHTS_COMMANDS = {
    "list": list_weights,
    "verify": verify_weights,
    "fetch": fetch_weights,
    "import": import_weights,
    "export": export_weights,
}


def presets(
    show_preset: option(
        str | None,
        "--show",
        metavar="NAME",
        autocompletion=complete_preset,
        help="Print every value of this preset, with what it means.",
    ) = None,
) -> None:
    """List the presets: front end, matcher and weights."""
    from matcher.config import NearestConfig, NetworkConfig, described
    from matcher.presets import DEFAULT_PRESET, PRESETS, find_plugin, find_preset, package_of, plugin_names

    if show_preset is not None:
        for name, value, meaning in described(find_preset(show_preset)):
            show(f"{name:<36} {value!s:<24} {meaning}".rstrip(), always=True)
        return
    for name, config in PRESETS.items():
        source = f"{config.extractor.max_keypoints} {config.extractor.kind} keypoints"
        if isinstance(config.matcher, NearestConfig):
            how = f"mutual nearest neighbours, ratio {config.matcher.ratio:g}"
        elif isinstance(config.matcher, NetworkConfig):
            context = config.matcher.context
            heads = f"{context.heads} head{'' if context.heads == 1 else 's'}"
            how = f"{context.depth} layers of {context.dim}-d, {heads}; weights {config.weights}"
            if config.matcher.backbone is not None:
                source = f"all cells of the 1/8 grid of {config.extractor.resize} pixels"
        else:
            how = type(config.matcher).__name__.removesuffix("Config")
        show(f"{name + ' (default)' * (name == DEFAULT_PRESET):<24} {source}; {how}")
    for name in plugin_names():
        if name not in PRESETS:
            show(f"{name:<24} added by {package_of(find_plugin(name))}")


VARIABLES = {
    "MATCHER_DATA": "Folder with photos/ and bench/ for `train` and `evaluate`; ../shared if not set.",
    "MATCHER_CACHE": "Folder for downloaded weights and compiled kernels.",
    "MATCHER_OFFLINE": "1: never use the network; `weights fetch` fails at once.",
    "MATCHER_COMPILED": "0: do not use the compiled kernels; a target such as avx2: use those of it.",
    "MATCHER_DEBUG": "1: print the traceback of every error.",
    "MATCHER_VENV": "Virtual environment that scripts/demo.py and run_tests.py create; .venv if not set.",
    "MATCHER_LIGHTGLUE_CODE": "Source file of the published LightGlue, to compare with in tests.",
    "MATCHER_SUPERGLUE_CODE": "Source file of the published SuperGlue, to compare with in tests.",
    "MATCHER_PUBLISHED": "Folder of published weights files, to import in tests.",
    "OMP_NUM_THREADS": "Number of CPU threads; all cores if not set.",
}
_PACKAGES = (
    "torch", "numpy", "opencv-python-headless", "kornia", "pillow", "poselib", "safetensors",
    "pycolmap", "h5py", "pillow-heif", "ray", "rerun-sdk", "gradio", "onnxruntime",
)  # fmt: skip


def environment(
    compile_kernels: option(
        bool, "--compile", help="First compile the kernels that make matching on this processor faster."
    ) = False,
) -> None:
    """Print versions, the device and kernels in use, and the environment variables with their values.

    Please include this output in bug reports.
    """
    from matcher.files import cache_folder

    if compile_kernels:
        from matcher.kernels import build

        show(f"kernels: {build()}")

    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    show(f"matcher {matcher.__version__}, Python {platform.python_version()}, {platform.platform()}")
    show(", ".join(f"{name} {installed(name)}" for name in _PACKAGES))
    for line in _machine():
        show(line)
    show(f"cache: {cache_folder()}\n")
    width = max(map(len, VARIABLES))
    for name, meaning in VARIABLES.items():
        show(f"{name:<{width}}  {meaning}")
        if name in os.environ:
            show(f"{'':<{width}}  set to {os.environ[name]!r}")


def _machine() -> list[str]:
    """Device, precision and kernels that `auto` chooses."""
    try:
        import torch
    except ModuleNotFoundError:
        return ["device: cpu, by ONNX Runtime; torch is not installed"]
    from matcher.kernels import kernels
    from matcher.kernels.loader import library_in_use
    from matcher.match.network import resolve_precision
    from matcher.torch_engine import resolve_device

    device = resolve_device("auto")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
    compiled = "not compiled; `matcher env --compile` makes them"
    if kernels() is not None:
        compiled = f"compiled for {library_in_use().split('-')[0]}"
    precision = resolve_precision("auto", device)
    cuda = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    return [
        f"device: {device} ({name}), {torch.get_num_threads()} threads, precision auto is {precision}",
        f"PyTorch: {torch.__version__}, a build {cuda}",
        *([] if torch.version.cuda else [f"  for an NVIDIA GPU (Linux, 5.8 GB installed): {CUDA_BUILD}"]),
        *([] if torch.version.cuda is None else [f"  without GPU, 0.75 GB installed: {CPU_BUILD}"]),
        f"kernels: {compiled}",
    ]


def serve(
    port: option(int, metavar="N", min=0, max=65535, help="First port to try; 0 takes any free one.") = 7860,
    device: of_preset("device") = "auto",
    max_upload: option(int, metavar="MB", min=1, help="Refuse photos larger than MB megabytes.") = 50,
) -> None:
    """Serve a local web page that matches two photos (needs the extra [app])."""
    from matcher.serve.server import serve as run

    def show_address(address: str) -> None:
        show(f"Open {address} in a browser; Ctrl-C stops the server.", always=True)

    run(port=port, device=device, max_megabytes=max_upload, on_address=show_address)
