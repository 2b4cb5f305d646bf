"""Many images, many pairs: the store of a run, the runner that fills it, exchange formats built on it."""
