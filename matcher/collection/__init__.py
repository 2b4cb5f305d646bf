"""Matching image collections: the store of a run, the runner that fills it, and export formats."""
