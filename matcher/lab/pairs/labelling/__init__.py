"""Depth and poses for pictures of real places: structure from motion, dense stereo, and what agrees."""
