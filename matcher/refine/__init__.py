"""Subpixel refinement of matches by least-squares matching on the images."""
