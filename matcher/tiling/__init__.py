"""Images of any size: keypoints by tiles at full resolution, matched window by window."""
