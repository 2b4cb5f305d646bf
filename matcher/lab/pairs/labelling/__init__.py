"""Depth and poses for photos of real scenes: structure from motion, multi-view stereo, consistency checks."""
