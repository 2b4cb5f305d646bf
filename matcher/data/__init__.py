"""The nouns: images, features, matches, cameras, and what can be computed from one of them."""
