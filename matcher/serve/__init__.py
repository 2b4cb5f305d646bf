"""The page that one can click: two photos in, matches, geometry and the report out. On this machine only."""
