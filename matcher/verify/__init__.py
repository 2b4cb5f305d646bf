"""Matches → two-view geometry."""
