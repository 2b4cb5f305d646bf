"""Features of two images → matches."""
