"""Accuracy of matchers on pairs with ground truth."""
