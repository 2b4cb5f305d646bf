"""Benchmarks: pairs with a truth, what a matcher makes of them, and tables that say how sure they are."""
