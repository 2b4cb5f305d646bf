"""One image brought onto another, and a template found in images."""
