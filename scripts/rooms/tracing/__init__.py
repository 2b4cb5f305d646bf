"""Rooms composed at random and drawn by ray casting, for `scripts/rooms/trace_views.py`."""
