"""The laboratory: pairs with truth, training, evaluation and benchmarks."""
