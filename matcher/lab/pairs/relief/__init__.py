"""Scenes with relief and clutter, made of photos, plain surfaces and noise; depth is known at every pixel."""
