"""Features of two pictures → matches."""
