"""The header of a weights file in memory: whose parameters it holds; no torch.

Errors are `IntegrityError` and read on after the file's name.
"""

from __future__ import annotations

import json
from dataclasses import replace

from matcher.config import ALL_LAYERS, NetworkConfig
from matcher.config_tables import from_dict
from matcher.errors import IntegrityError
from matcher.weights.renames import current_config


def read_header(data: bytes) -> dict[str, str]:
    """The metadata in the header, which is 8 bytes of length (little endian), then JSON.

    Raises:
        IntegrityError: the bytes are not those of a safetensors file.
    """
    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length]) if 2 <= length <= len(data) - 8 else None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        pickle = data[:2] == b"PK" or data[:1] == b"\x80"
        what = (
            "is a PyTorch pickle, not a safetensors file"
            if pickle
            else "is not a safetensors file, or is cut short"
        )
        raise IntegrityError(what)
    metadata = header.get("__metadata__")
    return metadata if isinstance(metadata, dict) else {}


def network_config(data: bytes) -> NetworkConfig:
    """The network that the file holds, which runs all layers on all points until a policy is given.

    Raises:
        IntegrityError: there is no configuration, or none that can be used.
    """
    text = read_header(data).get("config")
    if not isinstance(text, str):
        raise IntegrityError("carries no configuration in its header, so it is not one of our weights files")
    try:
        return replace(from_dict(NetworkConfig, current_config(json.loads(text))), policy=ALL_LAYERS)
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        raise IntegrityError(f"carries a configuration that cannot be used ({error})") from error


def front_end_of(data: bytes, kind: str) -> None:
    """Refuse a file that is not of the front end `kind`.

    Raises:
        IntegrityError: it is of another one, or of none.
    """
    found = read_header(data).get("frontend")
    if found != kind:
        whose = f"of the front end {found}" if found else "of no front end"
        raise IntegrityError(f"holds parameters {whose}, not of {kind}")
