"""Planar alignment of two images, and detection of a template in images."""
