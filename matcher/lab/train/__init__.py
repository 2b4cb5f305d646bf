"""Training: scenes, views, pairs, losses, loop."""
