"""Drawings of matches, keypoints, overlays and plots."""
