"""Cameras and points of many photos, by COLMAP."""
