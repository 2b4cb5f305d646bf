"""Examples in docstrings (`>>> …`) as code blocks of the site; an extension of griffe."""

import re

import griffe

EXAMPLE = re.compile(r"(?m)^(?P<indent> *)>>> .*(?:\n(?P=indent)\S.*)*")


class Doctests(griffe.Extension):
    """Fences every example of every docstring."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Called for each module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(_fenced, obj.docstring.value)


def _fenced(found: re.Match) -> str:
    lines = [line.removeprefix(found["indent"]) for line in found[0].splitlines()]
    return "\n".join(["```pycon", *lines, "```"])
