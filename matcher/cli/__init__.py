"""The command line: parse, make one library call, print.

Each command is a function in a file of its own that imports what it needs when it runs, so `--help` is fast.
A new command is one import and one line in `COMMANDS` or `GROUPS`.
"""

from __future__ import annotations

import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import Annotated

import typer

import matcher
from matcher.cli.align import align
from matcher.cli.collection import collection, merge, status
from matcher.cli.environment import environment
from matcher.cli.evaluate import evaluate
from matcher.cli.exits import exit_code_of
from matcher.cli.explain import explain
from matcher.cli.export import export
from matcher.cli.find import find
from matcher.cli.localize import localize
from matcher.cli.match import match
from matcher.cli.messages import complain, detail, messages, survive_odd_names
from matcher.cli.presets import presets
from matcher.cli.report import report
from matcher.cli.running import runnable
from matcher.cli.serve import serve
from matcher.cli.sfm import sfm
from matcher.cli.track import track
from matcher.cli.train import train
from matcher.cli.weights import COMMANDS as WEIGHTS
from matcher.threads import bound_primitives

COMMANDS = {
    "match": match,
    "align": align,
    "find": find,
    "explain": explain,
    "collection": collection,
    "status": status,
    "merge": merge,
    "report": report,
    "export": export,
    "sfm": sfm,
    "localize": localize,
    "track": track,
    "serve": serve,
    "evaluate": evaluate,
    "presets": presets,
    "train": train,
    "env": environment,
}
GROUPS = {"weights": ("List, check, download, convert and export weights.", WEIGHTS)}


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


def build() -> typer.Typer:
    """The application with all its commands."""
    # Without markup typer prints plain help, which takes half the time of the framed one.
    app = typer.Typer(
        rich_markup_mode=None, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]}
    )
    app.callback()(_root)
    for name, command in COMMANDS.items():
        app.command(name)(runnable(command, name))
    for name, (purpose, commands) in GROUPS.items():
        group = typer.Typer(help=purpose, no_args_is_help=True)
        for key, command in commands.items():
            group.command(key)(runnable(command, f"{name} {key}"))
        app.add_typer(group, name=name)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (`sys.argv` when no arguments are given) and return its exit code."""
    survive_odd_names()
    bound_primitives()
    with_signals = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _terminate) if with_signals else None
    try:
        with messages(), warnings.catch_warnings():
            warnings.showwarning = _warn
            code = _run(arguments)
            detail(f"exit code {code}")
            return code
    finally:
        if with_signals:
            signal.signal(signal.SIGTERM, before)


def _run(arguments: Sequence[str] | None) -> int:
    try:
        code = build()(args=arguments, prog_name="matcher", standalone_mode=False)
        sys.stdout.flush()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except (Exception, KeyboardInterrupt) as error:
        return exit_code_of(error)
    return code if isinstance(code, int) else 0


def _warn(message: Warning | str, *_: object) -> None:
    """Print a warning on one line, without the source location that Python would add."""
    complain(f"warning: {message}")


def _terminate(*_: object) -> None:
    """Exit through an exception, so that half-written files are removed."""
    sys.exit(143)
