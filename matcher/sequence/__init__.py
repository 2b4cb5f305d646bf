"""Frames in order: tracks, keyframes, poses and depth for a program that sees one frame after the other."""
