"""Further passes over a pair whose first pass was not confident: other features, crops and scales."""
