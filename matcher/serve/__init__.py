"""The web page: two photos in; matches, geometry and the report out. On this machine only."""
