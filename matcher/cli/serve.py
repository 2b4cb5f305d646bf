"""`matcher serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from matcher.cli import options
from matcher.cli.messages import show


def serve(
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="First port to try; 0 takes any free one.")
    ] = 7860,
    device: options.Device = "auto",
    max_upload: Annotated[
        int, typer.Option(metavar="MB", min=1, help="Refuse photos larger than MB megabytes.")
    ] = 50,
) -> None:
    """Serve a local web page that matches two photos (needs the extra [app])."""
    from matcher.serve.server import serve as run

    def show_address(address: str) -> None:
        show(f"Open {address} in a browser; Ctrl-C stops the server.", always=True)

    run(port=port, device=device, max_megabytes=max_upload, on_address=show_address)
