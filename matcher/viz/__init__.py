"""Drawings of matches, keypoints, overlays and plots."""

PLOT_SUFFIXES = (".png", ".jpg", ".jpeg", ".pdf", ".svg")
