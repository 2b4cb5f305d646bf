"""Drawings: matches, what became of keypoints, one view over the other, epipolar lines."""
