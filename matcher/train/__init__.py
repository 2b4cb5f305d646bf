"""From photos to a weights file."""
