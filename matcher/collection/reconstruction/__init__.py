"""From a finished run to cameras and points, by COLMAP."""
