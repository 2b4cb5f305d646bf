"""The command line: parse, make one library call, print.

Each command is a function that imports what it needs when it runs, so `--help` is fast; only the file of the
command that was typed is imported. A new command is one line in `COMMANDS`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Annotated

import typer

import matcher
from matcher.cli.options import runnable
from matcher.cli.output import complain, detail, exit_code_of, messages, open_standard_streams
from matcher.processes import bound_primitives

COMMANDS = {  # where their functions are
    "match": "matcher.cli.pair:match",
    "align": "matcher.cli.pair:align",
    "find": "matcher.cli.pair:find",
    "stitch": "matcher.cli.pair:stitch",
    "explain": "matcher.cli.pair:explain",
    "collection": "matcher.cli.runs:collection",
    "status": "matcher.cli.runs:status",
    "merge": "matcher.cli.runs:merge",
    "report": "matcher.cli.runs:report",
    "export": "matcher.cli.runs:export",
    "sfm": "matcher.cli.sfm:sfm",
    "localize": "matcher.cli.localize:localize",
    "track": "matcher.cli.track:track",
    "serve": "matcher.cli.machine:serve",
    "evaluate": "matcher.cli.laboratory:evaluate",
    "presets": "matcher.cli.machine:presets",
    "train": "matcher.cli.laboratory:train",
    "env": "matcher.cli.machine:environment",
}
GROUPS = {
    "weights": ("List, check, download, convert and export weights.", "matcher.cli.machine:WEIGHTS_COMMANDS")
}


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"matcher {matcher.__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Match keypoints between two or many images and estimate the geometry that relates the views.

    Exit codes: 0 done, 1 internal error, 2 wrong usage, 3 an image could not be read, 4 finished but some
    items failed, 5 weights or stored data missing or damaged, 6 out of memory or disk space, 130 or 143
    interrupted. `matcher env` lists the environment variables.
    """


def build(only: str | None = None) -> typer.Typer:
    """The application with all its commands, or with one command or group."""
    # Without markup typer prints plain help, which takes half the time of the framed one.
    app = typer.Typer(
        rich_markup_mode=None, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]}
    )
    app.callback()(_root)
    for name, place in COMMANDS.items():
        if only in (None, name):
            app.command(name)(runnable(resolve_name(place), name))
    for name, (purpose, place) in GROUPS.items():
        if only in (None, name):
            group = typer.Typer(help=purpose, no_args_is_help=True)
            for key, command in resolve_name(place).items():
                group.command(key)(runnable(command, f"{name} {key}"))
            app.add_typer(group, name=name)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (`sys.argv` when no arguments are given) and return its exit code."""
    open_standard_streams()
    bound_primitives()
    with_signals = threading.current_thread() is threading.main_thread()
    # SIGTERM becomes an exception, so that half-written files are removed.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)) if with_signals else None
    try:
        with messages(), warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: complain(f"warning: {message}")  # on one line
            code = _run(arguments)
            detail(f"exit code {code}")
            return code
    finally:
        if with_signals:
            signal.signal(signal.SIGTERM, before)


def _run(arguments: Sequence[str] | None) -> int:
    typed = next(iter(sys.argv[1:] if arguments is None else arguments), None)
    alone = typed in COMMANDS | GROUPS and "_MATCHER_COMPLETE" not in os.environ  # by a shell that completes
    try:
        app = build(typed if alone else None)
        code = app(args=arguments, prog_name="matcher", standalone_mode=False)
        sys.stdout.flush()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except (Exception, KeyboardInterrupt) as error:
        return exit_code_of(error)
    return code if isinstance(code, int) else 0
