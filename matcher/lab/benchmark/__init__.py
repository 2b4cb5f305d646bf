"""How fast: our networks against other implementations with the same parameters, on this machine."""
