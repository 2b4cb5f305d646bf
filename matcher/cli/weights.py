"""Shipped and published weights: `matcher weights list`, `verify`, `fetch`, `import`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def list_weights() -> None:
    """List our weights and the field's published ones: licence, size, source, and whether they are here."""
    from matcher.errors import IntegrityError
    from matcher.weights.files import read_manifest
    from matcher.weights.published.catalogue import read_catalogue

    typer.echo("Shipped with this package")
    try:
        shipped = read_manifest()
    except IntegrityError as error:
        typer.echo(f"  none: {error}")
        shipped = {}
    for row in shipped.values():
        typer.echo(f"{row.name}  {row.bytes / 1e6:.1f} MB  {row.licence}  preset {row.preset}")
        typer.echo(f"  file        {row.file}  sha256 {row.sha256}")
        typer.echo(f"  source      {row.source}")
        typer.echo(f"  trained on  {row.trained_on}")
        typer.echo(f"  measured    {' '.join(row.metrics.split())}")
    typer.echo("\nPublished by others, never shipped; `matcher weights fetch NAME` gets them")
    for published in read_catalogue().values():
        here = "here" if (published.folder / "manifest.toml").is_file() else "not here"
        use = "yes" if published.commercial else "no"
        what = f"preset {published.preset}" if published.preset else "front end"
        typer.echo(f"{published.name}  {published.megabytes:.1f} MB  {what}  {here}  commercial use: {use}")
        typer.echo(f"  licence     {published.licence}")
        typer.echo(f"  source      {published.source} ({published.paper})")
        if published.note:
            typer.echo(f"  note        {published.note}")


def verify_weights(
    names: Annotated[
        list[str] | None, typer.Argument(help="Which; all that are here when none is named.")
    ] = None,
) -> None:
    """Check weights against their manifests; exit 5 when one is absent or damaged."""
    from matcher.errors import IntegrityError, UsageError
    from matcher.presets import unknown_name
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
            typer.echo(f"ok       {name}  {path}")
        except IntegrityError as error:
            typer.echo(f"damaged  {name}  {error}", err=True)
            failed += 1
    if failed:
        raise IntegrityError(f"{failed} of {len(chosen)} weights files are absent or damaged")


def fetch_weights(
    names: Annotated[list[str], typer.Argument(help="Names that `matcher weights list` shows.")],
    accept_licence: Annotated[
        bool, typer.Option("--accept-licence", help="Agree to licences that forbid commercial use.")
    ] = False,
) -> None:
    """Download published weights to the cache (MATCHER_CACHE), check them, and convert them."""
    from matcher.weights.published.catalogue import find_published
    from matcher.weights.published.fetching import fetch

    rows = [find_published(name) for name in names]
    for row in rows:
        typer.echo(
            f"{row.name}: {row.licence}; commercial use: {'yes' if row.commercial else 'no'}; {row.source}"
        )
        found = fetch(row, accept_licence=accept_licence, report=_show_progress)
        for file in row.files if found.sha256 else ():
            remark = "as expected" if file.sha256 else "the one to expect is not known, so it is not checked"
            typer.echo(f"  {file.name}  sha256 {found.sha256[file.name]} ({remark})")
        typer.echo(f"  {'converted' if found.sha256 else 'already here'}  {found.path}")


def import_weights(
    files: Annotated[
        list[Path], typer.Argument(help="A published checkpoint: .pth, .pt, .ckpt, .safetensors.")
    ],
    preset: Annotated[str, typer.Option("--preset", help="The preset or front end whose network it is.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", help="A .safetensors file; the cache, where the preset looks, when absent."),
    ] = None,
) -> None:
    """Convert a checkpoint that you have into a weights file; nothing in it is run."""
    from matcher.files import check_output
    from matcher.weights.published.fetching import import_files

    if output is not None:
        check_output(output, (".safetensors",))
    typer.echo(f"converted  {import_files(files, preset, output)}")


def _show_progress(have: int, total: int) -> None:
    if sys.stderr.isatty():
        share = f"{100 * have // total:3d} %" if total else ""
        end = "\n" if have == total else ""
        sys.stderr.write(f"\r  {have / 1e6:8.1f} MB {share}{end}")
        sys.stderr.flush()


COMMANDS = {"list": list_weights, "verify": verify_weights, "fetch": fetch_weights, "import": import_weights}
