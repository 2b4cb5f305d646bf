"""Failures whose messages are for the user; `exit_code` is what the command line returns."""


class MatcherError(Exception):
    """A failure whose message is for the user; `exit_code` is what the command line returns."""

    exit_code = 1


class UsageError(MatcherError, ValueError):
    """An option, configuration or argument that cannot be used."""

    exit_code = 2


class ImageError(MatcherError):
    """An image that cannot be read; the message names the file and the remedy."""

    exit_code = 3


class IntegrityError(MatcherError):
    """Weights or stored data that are absent or damaged."""

    exit_code = 5
