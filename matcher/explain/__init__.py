"""Why points matched or not: attention, assignment by layer, exit and pruning of one pair."""
