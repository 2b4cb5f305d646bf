"""Rooms composed at random and drawn by ray casting, for `scripts/trace_views.py`."""
