"""The field's published checkpoints: where they are, how to fetch them, which tensor is which of ours."""
