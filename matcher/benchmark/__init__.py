"""Speed against other implementations."""
