"""Pairs of pictures with a known truth."""
