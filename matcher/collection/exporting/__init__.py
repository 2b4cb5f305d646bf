"""Writers of what other programs read: a room of formats, each with its own pixel origin and limits."""
