"""Cameras in stored-image pixels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Camera:
    """A pinhole camera in stored-image pixels."""

    fx: float
    fy: float
    cx: float
    cy: float
