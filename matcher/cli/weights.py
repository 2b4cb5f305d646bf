"""Shipped and published weights: `matcher weights list`, `verify`, `fetch`, `import`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from matcher.cli import options
from matcher.cli.messages import complain, show, wants_progress


def list_weights() -> None:
    """List shipped and published weights: licence, size, source, and whether they are installed."""
    from matcher.errors import IntegrityError
    from matcher.weights.files import read_manifest
    from matcher.weights.published.catalogue import read_catalogue

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
    show("\nPublished by others, never shipped; `matcher weights fetch NAME` downloads them")
    for published in read_catalogue().values():
        here = "here" if (published.folder / "manifest.toml").is_file() else "not here"
        use = "yes" if published.commercial else "no"
        what = f"preset {published.preset}" if published.preset else "front end"
        show(f"{published.name}  {published.megabytes:.1f} MB  {what}  {here}  commercial use: {use}")
        show(f"  licence     {published.licence}")
        show(f"  source      {published.source} ({published.paper})")
        if published.note:
            show(f"  note        {published.note}")


def verify_weights(
    names: Annotated[
        list[str] | None, typer.Argument(help="Names to check; all that are installed if none is given.")
    ] = None,
) -> None:
    """Check weights files against their checksums; exit code 5 if one is missing or damaged."""
    from matcher.errors import IntegrityError, UsageError, unknown_name
    from matcher.weights.files import read_manifest, verify
    from matcher.weights.published.catalogue import locate, read_catalogue

    rows, published = read_manifest(), read_catalogue()
    for name in names or ():
        if name not in rows and name not in published:
            raise UsageError(unknown_name("weights", name, rows | published))
    here = [row.name for row in published.values() if (row.folder / "manifest.toml").is_file()]
    chosen = names or [*rows, *here]
    failed = 0
    for name in chosen:
        try:
            path = verify(rows[name]) if name in rows else locate(published[name])
            show(f"ok       {name}  {path}")
        except IntegrityError as error:
            complain(f"damaged  {name}  {error}")
            failed += 1
    if failed:
        raise IntegrityError(f"{failed} of {len(chosen)} weights files are absent or damaged")


def fetch_weights(
    names: Annotated[list[str], typer.Argument(help="Names shown by `matcher weights list`.")],
    accept_licence: Annotated[
        bool, typer.Option("--accept-licence", help="Accept licences that forbid commercial use.")
    ] = False,
) -> None:
    """Download published weights to the cache (MATCHER_CACHE), check them and convert them."""
    from matcher.weights.published.catalogue import find_published
    from matcher.weights.published.fetching import fetch

    rows = [find_published(name) for name in names]
    for row in rows:
        show(f"{row.name}: {row.licence}; commercial use: {'yes' if row.commercial else 'no'}; {row.source}")
        found = fetch(row, accept_licence=accept_licence, report=_show_progress)
        for file in row.files if found.sha256 else ():
            remark = "as expected" if file.sha256 else "the one to expect is not known, so it is not checked"
            show(f"  {file.name}  sha256 {found.sha256[file.name]} ({remark})")
        show(f"  {'converted' if found.sha256 else 'already here'}  {found.path}")


def import_weights(
    files: Annotated[
        list[Path], typer.Argument(help="Published checkpoint: .pth, .pt, .ckpt or .safetensors.")
    ],
    preset: Annotated[
        str, typer.Option("--preset", help="Preset or front end that the checkpoint belongs to.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", help="A .safetensors file; default: the cache, where the preset looks."),
    ] = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Convert a checkpoint that you have into a weights file; no code in it is executed."""
    from matcher.files import check_output
    from matcher.weights.published.fetching import import_files

    if output is not None:
        check_output(output, (".safetensors",), overwrite=overwrite)
    show(f"converted  {import_files(files, preset, output)}")


def _show_progress(have: int, total: int) -> None:
    if sys.stderr.isatty() and wants_progress():
        share = f"{100 * have // total:3d} %" if total else ""
        end = "\n" if have == total else ""
        sys.stderr.write(f"\r  {have / 1e6:8.1f} MB {share}{end}")
        sys.stderr.flush()


COMMANDS = {"list": list_weights, "verify": verify_weights, "fetch": fetch_weights, "import": import_weights}
