"""Matches in, matches exact to a fraction of a pixel out: least-squares matching on the images themselves."""
