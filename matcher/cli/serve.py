"""`matcher serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from matcher.cli import options


def serve(
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="The first that is tried; 0: any.")
    ] = 7860,
    device: options.Device = "auto",
    max_upload: Annotated[int, typer.Option(metavar="MB", min=1, help="Larger photos are refused.")] = 50,
) -> None:
    """A page to match two photos by hand, for this machine only (extra [app]); stop it with Ctrl-C."""
    from matcher.cli.result import as_bytes, summary
    from matcher.serve.server import serve as run

    def tell(address: str) -> None:
        typer.echo(f"open {address} in a browser; Ctrl-C ends it")

    run(as_bytes, summary, port=port, device=device, max_megabytes=max_upload, tell=tell)
