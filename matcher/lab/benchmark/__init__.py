"""Speed and memory on this machine, next to other implementations with the same parameters."""
