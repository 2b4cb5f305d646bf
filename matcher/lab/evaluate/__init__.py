"""Accuracy: run methods on pairs with ground truth and report metrics with confidence intervals."""
