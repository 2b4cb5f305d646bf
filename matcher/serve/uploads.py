"""Only files that were uploaded are read: gradio leaves that to applications that are mounted, as ours is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import gradio as gr
from gradio.utils import get_upload_folder


class UploadsOnly(gr.Blocks):
    """A page whose events take no file but one in the folder of its uploads.

    Of a mounted page gradio checks no path: a request that names any file of this machine has it copied to
    where it is served, and one that names an address has it fetched.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.has_launched = True  # else gradio makes none of its own checks

    async def preprocess_data(self, block_fn: Any, inputs: list, *arguments: Any, **options: Any) -> Any:
        """What gradio makes of the inputs of an event.

        Raises:
            gradio.Error: one of them names a file elsewhere.
        """
        folder = os.path.realpath(get_upload_folder())
        for path in _paths(inputs):
            if not isinstance(path, str) or not os.path.realpath(path).startswith(folder + os.sep):
                raise gr.Error("Only files that were uploaded to this page are read.", print_exception=False)
        return await super().preprocess_data(block_fn, inputs, *arguments, **options)


def _paths(value: Any) -> Iterator[Any]:
    """All values of `path`, at any depth."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            if "path" in each:
                yield each["path"]
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each
