"""Maps to come back to: where a photo was taken, from a reconstruction and the features of its images."""
