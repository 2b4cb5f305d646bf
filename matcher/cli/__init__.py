"""The command line: parse, make one library call, print.

Each command is a function that imports what it needs when it runs, so `--help` is fast; only the file of the
command that was typed is imported. A new command is one name in `_FILES`.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pkgutil import resolve_name
from typing import Annotated, NoReturn

import typer

import matcher
from matcher.cli.options import OnceEach, runnable
from matcher.cli.output import complain, detail, exit_code_of, messages, open_standard_streams
from matcher.processes import restrain_libraries

_WEIGHTS = ("weights list", "weights verify", "weights fetch", "weights import", "weights export")
_FILES = {  # what is in each: a function of the command's name, `list_weights` for `weights list`
    "pair": ("match", "align", "find", "stitch", "explain"),
    "runs": ("collection", "status", "merge", "report", "export"),
    "sfm": ("sfm", "localize"),
    "track": ("track",),
    "laboratory": ("evaluate", "train"),
    "machine": ("serve", "presets", "env", *_WEIGHTS),
}
COMMANDS = {name: file for file in _FILES for name in _FILES[file]}
GROUPS = {"weights": "List, check, download, convert and export weights."}


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
    groups = {name: typer.Typer(help=purpose, no_args_is_help=True) for name, purpose in GROUPS.items()}
    for name, file in COMMANDS.items():
        first, _, second = name.partition(" ")
        if only in (None, first):
            command = resolve_name(f"matcher.cli.{file}:{'_'.join(reversed(name.split()))}")
            add = (groups[first] if second else app).command(second or first, cls=OnceEach)
            add(runnable(command, name))
    for name, group in groups.items():
        if only in (None, name):
            app.add_typer(group, name=name)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (`sys.argv` when no arguments are given) and return its exit code."""
    open_standard_streams()
    restrain_libraries()
    with_signals = threading.current_thread() is threading.main_thread()
    # SIGTERM becomes an exception, so that half-written files are removed.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)) if with_signals else None
    try:
        with messages(), warnings.catch_warnings():
            tell = cache(lambda text: complain(f"warning: {text}"))  # on one line, and once
            warnings.showwarning = lambda message, *_, **__: tell(str(message))
            typed = next(iter(sys.argv[1:] if arguments is None else arguments), None)
            completing = "_MATCHER_COMPLETE" in os.environ  # by a shell, which needs all commands
            try:
                app = build(typed if typed in COMMANDS | GROUPS and not completing else None)
                code = app(args=arguments, prog_name="matcher", standalone_mode=False)
                sys.stdout.flush()
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else 1
            except (Exception, KeyboardInterrupt) as error:
                code = exit_code_of(error)
            detail(f"exit code {code or 0}")
            return code or 0
    finally:
        if with_signals:
            signal.signal(signal.SIGTERM, before)


def program() -> NoReturn:
    """`main` as a program: the process ends with its exit code."""
    code = main()
    # Python would take half a second more to take the libraries down.
    if sys.argv[1:2] != ["serve"]:  # where it would wait for what is being matched
        atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    watched = "profile" in sys.modules or sys.gettrace()  # by what writes when programs end as usual
    (sys.exit if watched else os._exit)(code)
