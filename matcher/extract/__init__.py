"""Front ends: pictures in, features out."""
