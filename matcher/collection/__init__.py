"""Many pictures: which pairs to match, a store that survives, and what other programs read."""
