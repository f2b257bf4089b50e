"""Comparisons of the representations that layers learn."""
