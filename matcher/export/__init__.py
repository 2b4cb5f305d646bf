"""Runs written for COLMAP, hloc, NumPy, OpenMVG and kapture, each with its own pixel origin."""
