"""Keypoints, layers and passes that fit a time budget."""
