"""List and check the shipped weights: `matcher weights list`, `matcher weights verify`."""

from __future__ import annotations

from typing import Annotated

import typer


def list_weights() -> None:
    """List the shipped weights, where they come from and what they reach."""
    from matcher.weights import read_manifest

    for row in read_manifest().values():
        typer.echo(f"{row.name}  {row.bytes / 1e6:.1f} MB  {row.licence}  preset {row.preset}")
        typer.echo(f"  file        {row.file}  sha256 {row.sha256}")
        typer.echo(f"  source      {row.source}")
        typer.echo(f"  trained on  {row.trained_on}")
        typer.echo(f"  measured    {' '.join(row.metrics.split())}")


def verify_weights(
    names: Annotated[list[str] | None, typer.Argument(help="Which; all when none is named.")] = None,
) -> None:
    """Check the shipped files against the manifest; exit 5 when one is absent or damaged."""
    from matcher.presets import unknown_name
    from matcher.types import IntegrityError, UsageError
    from matcher.weights import read_manifest, verify

    rows = read_manifest()
    for name in names or ():
        if name not in rows:
            raise UsageError(unknown_name("weights", name, rows))
    failed = 0
    for name in names or rows:
        try:
            typer.echo(f"ok       {name}  {verify(rows[name])}")
        except IntegrityError as error:
            typer.echo(f"damaged  {name}  {error}", err=True)
            failed += 1
    if failed:
        raise IntegrityError(f"{failed} of {len(names or rows)} weights files are absent or damaged")


COMMANDS = {"list": list_weights, "verify": verify_weights}
