"""Pairs of images with ground truth: benchmark sets and synthetic pairs."""
