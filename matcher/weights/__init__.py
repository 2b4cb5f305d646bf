"""Weights files: those shipped, and the published ones of others."""
