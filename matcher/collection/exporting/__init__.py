"""Export formats of other programs, each with its own pixel origin and limits."""
