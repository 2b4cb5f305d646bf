"""Front ends: images in, features out."""
