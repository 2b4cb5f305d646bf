"""Training of the front end."""
