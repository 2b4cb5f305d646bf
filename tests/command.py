"""The command line in this process."""

from matcher.cli import main


def run(*arguments: object) -> int:
    """The exit code of a command."""
    return main([str(argument) for argument in arguments])
