"""Commands about what is installed: `weights`, `presets`, `env`, `serve`."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal

import typer

import matcher
from matcher import presets as known
from matcher.cli.options import Count, PresetName, check_outputs, loading
from matcher.cli.output import complain, exit_code_of, show, wants_progress
from matcher.config import NearestConfig, NetworkConfig, described
from matcher.errors import CPU_BUILD, CUDA_BUILD, IntegrityError, UsageError, counted, unknown_name
from matcher.files import cache_folder

Port = Annotated[int, ("min", 0), ("max", 65535)]


def list_weights() -> None:
    """List shipped and published weights: licence, size, source, and whether they are installed."""
    from matcher.weights.files import read_catalogue, read_manifest

    show("Shipped with this package")
    try:
        for row in read_manifest().values():
            show(f"{row.name}  {row.bytes / 1e6:.1f} MB  {row.licence}  preset {row.preset}")
            show(f"  file        {row.file}  sha256 {row.sha256}")
            show(f"  source      {row.source}")
            show(f"  trained on  {row.trained_on}")
            show(f"  measured    {' '.join(row.metrics.split())}")
    except IntegrityError as error:
        show(f"  none: {error}")
    show("\nPublished by others and not shipped; download with `matcher weights fetch NAME`")
    for row in read_catalogue().values():
        here = "installed" if row.is_here else "not installed"
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


def verify_weights(names: list[str] | None = None, /) -> None:
    """Check weights files against their checksums; exit with code 5 if one is missing or damaged.

    Args:
        names: Weights to check; by default all that are installed.
    """
    from matcher.weights.files import locate, read_catalogue, read_manifest, verify

    rows, published = read_manifest(), read_catalogue()
    for name in names or ():
        if name not in rows | published:
            raise UsageError(unknown_name("weights", name, rows | published))
    here = [row.name for row in published.values() if row.is_here]
    chosen, failed = names or [*rows, *here], 0
    for name in chosen:
        try:
            show(f"ok       {name}  {(verify(rows[name]) if name in rows else locate(published[name])).path}")
        except IntegrityError as error:
            absent = isinstance(error.__cause__, FileNotFoundError) or name not in [*rows, *here]
            complain(f"{'missing' if absent else 'damaged'}  {name}  {error}")
            failed += 1
    if failed:
        raise IntegrityError(f"{failed} of {len(chosen)} weights files are missing or damaged")


def fetch_weights(names: list[str], /, accept_licence: bool = False, accept_unverified: bool = False) -> None:
    """Download published weights to the cache (MATCHER_CACHE), verify and convert them.

    Args:
        names: Names from `matcher weights list`.
        accept_licence: Accept licences that do not allow commercial use.
        accept_unverified: Accept files whose SHA-256 is not known; what comes first must come later too.
    """
    from matcher.weights.files import find_published
    from matcher.weights.published import fetch

    def report(have: int, total: int) -> None:
        if wants_progress():
            share = f"{100 * have // total:3d} %" if total else ""
            typer.echo(f"\r  {have / 1e6:8.1f} MB {share}", err=True, nl=have == total)

    how = dict(accept_licence=accept_licence, accept_unverified=accept_unverified, report=report)
    for row in [find_published(name) for name in names]:
        show(f"{row.name}: {row.licence}; commercial use: {'yes' if row.commercial else 'no'}; {row.source}")
        found = fetch(row, **how)
        for file in row.files if found.sha256 else ():
            remark = "as expected" if file.sha256 else "not checked, since no expected value is known"
            show(f"  {file.name}  sha256 {found.sha256[file.name]} ({remark})")
        show(f"  {'converted' if found.sha256 else 'already installed'}  {found.path}")


def import_weights(
    files: list[Path], /, preset: str, output: Path | None = None, overwrite: bool = False
) -> None:
    """Convert a downloaded checkpoint into a weights file, without running any code in it.

    Args:
        files: Published checkpoint, a .pth, .pt, .ckpt or .safetensors file.
        preset (NAME): Preset or front end that the checkpoint belongs to.
        output (FILE.safetensors): File to create; by default in the cache, where the preset finds it.
    """
    from matcher.weights.published import import_files

    check_outputs([(output, (".safetensors",))], files, overwrite=overwrite)
    show(f"converted  {import_files(files, preset, output)}")


def export_weights(
    preset: PresetName,
    /,
    onnx: Path,
    given: loading(only=("weights", "frontend_weights")),
    numbers: Literal["float32", "float16", "int8"] = "float32",
    opencv: str | None = None,
    colmap: bool = False,
    overwrite: bool = False,
) -> None:
    """Write front end and matcher of a preset as ONNX files for other programs; takes minutes.

    Args:
        preset (PRESET): Whose networks.
        onnx (FOLDER): Folder to write the ONNX files to.
        numbers: What weights are written in; float16 and int8 make smaller files.
        opencv (WxH): Write files for OpenCV's ALIKED and LightGlueMatcher instead, for images of this size.
        colmap: Write files for COLMAP's ALIKED and LightGlue instead.
    """
    from matcher.export_onnx import export_preset

    config = known.find_preset(preset)
    if opencv is not None and colmap:
        raise typer.BadParameter("--opencv and --colmap write different files; give one of them")
    if opencv is not None:
        if numbers != "float32" or given:
            raise typer.BadParameter("--opencv writes the shipped weights in float32; leave the others out")
        width, _, height = opencv.partition("x")
        if not (width.isdecimal() and height.isdecimal()):
            raise typer.BadParameter(f"--opencv must be a size such as 640x480, not {opencv!r}")
        given["size"] = int(width), int(height)
    program = "opencv" if opencv is not None else "colmap" if colmap else "any"
    files = export_preset(preset, config, onnx, program, numbers=numbers, overwrite=overwrite, **given)
    for file in files:
        show(f"written  {file}  {file.stat().st_size / 1e6:.1f} MB")


def presets(show_: PresetName | None = None) -> None:
    """List the presets: front end, matcher and weights.

    Args:
        show_ (NAME|FILE.toml): Print every value of this preset, with what it means.
    """
    if show_ is not None:
        shown, given = known.from_file(show_, {})
        for name, value, meaning in described(known.configure(known.find_preset(shown), given)):
            show(f"{name:<36} {value!s:<24} {meaning}".rstrip(), always=True)
        return
    for name, config in known.PRESETS.items():
        source = f"{config.extractor.max_keypoints} {config.extractor.kind} keypoints"
        if isinstance(config.matcher, NearestConfig):
            how = f"mutual nearest neighbours, ratio {config.matcher.ratio:g}"
        elif not isinstance(config.matcher, NetworkConfig):
            how = repr(config.matcher)
        else:
            context = config.matcher.context
            heads = f"{context.heads} head{'' if context.heads == 1 else 's'}"
            how = f"{context.depth} layers of {context.dim}-d, {heads}; weights {config.weights}"
            if config.matcher.backbone is not None:
                source = f"all cells of the 1/8 grid of {config.extractor.resize} pixels"
        show(f"{name + ' (default)' * (name == known.DEFAULT_PRESET):<24} {source}; {how}")
    for name in known.plugin_names():
        if name not in known.PRESETS:
            show(f"{name:<24} added by {known.package_of(known.find_plugin(name))}")


VARIABLES = {
    "MATCHER_DATA": "Folder with photos/ and bench/ for `train` and `evaluate`; ../shared if not set.",
    "MATCHER_CACHE": "Folder for downloaded weights and compiled kernels.",
    "MATCHER_OFFLINE": "1: never use the network; `weights fetch` fails at once.",
    "MATCHER_COMPILED": "0: do not use the compiled kernels; a target such as avx2: use those of it.",
    "MATCHER_DEBUG": "1: print the traceback of every error.",
    "MATCHER_VENV": "Virtual environment that scripts/demo.py and run_tests.py create; .venv if not set.",
    "MATCHER_SUPERGLUE_CODE": "Source file of the published SuperGlue, to compare with in tests.",
    "MATCHER_PUBLISHED": "Folder of published weights files, to import in tests.",
    "OMP_NUM_THREADS": "Number of CPU threads; all cores if not set.",
}
_PACKAGES = (
    "torch", "numpy", "opencv-python-headless", "kornia", "pillow", "poselib", "safetensors",
    "pycolmap", "h5py", "pillow-heif", "ray", "rerun-sdk", "gradio", "onnxruntime",
)  # fmt: skip


def env(compile_: bool = False) -> None:
    """Print versions, the device and kernels in use, and the environment variables with their values.

    Please include this output in bug reports.

    Args:
        compile_: First compile the kernels that make matching on this processor faster.
    """
    from matcher.errors import is_installed

    if compile_:
        from matcher.kernels.loader import build

        show(f"kernels: {build()}")
    installed = dict.fromkeys(_PACKAGES, "not installed")
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    show(f"matcher {matcher.__version__}, Python {platform.python_version()}, {platform.platform()}")
    show(", ".join(f"{name} {found}" for name, found in installed.items()))
    if is_installed("torch"):
        import torch

        from matcher.kernels.loader import SWITCH, library_in_use
        from matcher.match.network import resolve_precision
        from matcher.torch_engine import resolve_device

        device = resolve_device("auto")
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
        precision, threads = resolve_precision("auto", device), torch.get_num_threads()
        cuda = torch.version.cuda
        show(f"device: {device} ({name}), {counted(threads, 'thread')}, precision auto is {precision}")
        show(f"PyTorch: {torch.__version__}, a build {f'for CUDA {cuda}' if cuda else 'without CUDA'}")
        other = f"without GPU, 0.75 GB installed: {CPU_BUILD}"
        show(f"  {other if cuda else f'for an NVIDIA GPU (Linux, 5.8 GB installed): {CUDA_BUILD}'}")
        compiled = library_in_use().partition("-")[0]
        off = os.environ.get(SWITCH) == "0"
        hint = f"switched off by {SWITCH}" if off else "not compiled; `matcher env --compile` makes them"
        show(f"kernels: {f'compiled for {compiled}' if compiled else hint}")
    else:
        show("device: cpu, by ONNX Runtime; torch is not installed")
    show(f"cache: {cache_folder()}\n")
    width = max(map(len, VARIABLES))
    for name, meaning in VARIABLES.items():
        show(f"{name:<{width}}  {meaning}")
        if name in os.environ:
            show(f"{'':<{width}}  set to {os.environ[name]!r}")


def serve(port: Port = 7860, *, given: loading(only=("device",)), max_upload: Count = 50) -> int:
    """Serve a local web page that matches two photos (needs the extra [app]).

    Args:
        port (N): First port to try; 0 takes any free one.
        max_upload (MB): Refuse photos larger than MB megabytes.
    """
    from matcher.serve.server import serve as run

    said = "Open {} in a browser; Ctrl-C stops the server."
    how = dict(port=port, max_megabytes=max_upload, **given)
    try:
        run(on_address=lambda address: show(said.format(address), always=True), **how)
    except KeyboardInterrupt as stop:
        return exit_code_of(stop)
    return 0
