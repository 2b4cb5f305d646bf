"""Further passes over a pair whose first one was not sure: other features, crops and scales."""
