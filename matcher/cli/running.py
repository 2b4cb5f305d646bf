"""What all commands share: `-v`, `-q`, `--log`, Ctrl-C, and errors that name the options the user typed."""

from __future__ import annotations

import inspect
import re
import shlex
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from matcher.cli.loading import LIBRARY_NAMES, with_preset_options
from matcher.cli.messages import detail, set_messages
from matcher.errors import MatcherError

Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print more details.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print only errors and requested output such as --json.")
]
LogFile = Annotated[
    Path | None, typer.Option("--log", metavar="FILE", help="Append all messages, with timestamps, to FILE.")
]
_COMMON = {"verbose": (Verbose, False), "quiet": (Quiet, False), "log": (LogFile, None)}
# Commands that keep finished work and continue from it.
_RESUMABLE = {"collection", "sfm", "train"}


class Interrupted(Exception):
    """Ctrl-C during a command; the message explains how to continue."""


def runnable(command: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The command as typer sees it, with the options that all commands share."""
    inner = with_preset_options(command)
    own = inspect.signature(inner, eval_str=True).parameters
    shared = [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for key, (kind, default) in _COMMON.items()
    ]
    parameters = [
        *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own.values()),
        *shared,
    ]
    options = option_names(parameters)

    @wraps(command)
    def run(**arguments: Any) -> Any:
        set_messages(**{key: arguments.pop(key) for key in _COMMON})
        detail(f"command: {shlex.join(sys.argv)}")
        try:
            return inner(**arguments)
        except KeyboardInterrupt:
            again = " to continue" if name in _RESUMABLE else ""
            raise Interrupted(f"interrupted; run the same command again{again}") from None
        except MatcherError as error:
            error.args = (in_options(str(error), options),)
            raise

    run.__signature__ = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def option_names(parameters: list[inspect.Parameter]) -> dict[str, str]:
    """The option that sets each of the library's names, such as `match_threshold`: `--threshold`."""
    found = {}
    for parameter in parameters:
        declared = [info for info in get_args(parameter.annotation) if type(info).__name__ == "OptionInfo"]
        if declared:
            # In an annotation, typer keeps the first name where a default would be.
            names = [declared[0].default, *(declared[0].param_decls or ())]
            given = next((text for text in names if str(text).startswith("--")), None)
            option = given or f"--{parameter.name.replace('_', '-')}"
            found[LIBRARY_NAMES.get(parameter.name, parameter.name)] = option
    return found


def in_options(text: str, options: dict[str, str]) -> str:
    """A library message in which the user's options replace the library's arguments.

    `overwrite=True` becomes `--overwrite`, `refine=False` `--no-refine`, and `geometry='none'`
    `--geometry none`. A name alone is replaced if it cannot be an ordinary word (`max_keypoints`); others,
    such as `resize`, only where they are the subject of a sentence.
    """
    for name, option in options.items():
        start = rf"(?<![\w./-]){name}"
        text = re.sub(rf"{start}={not option.startswith('--no-')}\b", option, text)
        text = re.sub(rf"{start}='?([^\s;:)']+)'?", rf"{option} \g<1>", text)
        if re.search(r"[_\d]", name):
            text = re.sub(rf"{start}(?![\w./-])", option, text)
        elif not option.startswith("--no-"):  # which means the opposite
            subject = rf"(^|\bso |[:;] ){name}(?= must | is | has | means | does | \d|: )"
            text = re.sub(subject, rf"\g<1>{option}", text)
    return text
