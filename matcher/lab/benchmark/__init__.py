"""Speed and memory on this machine, compared with other implementations with the same parameters."""
