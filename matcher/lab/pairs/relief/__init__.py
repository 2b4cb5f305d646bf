"""Scenes with relief and clutter, made of photos, plain surfaces and noise, with the depth of every pixel."""
