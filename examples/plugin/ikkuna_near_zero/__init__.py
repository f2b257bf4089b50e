"""A metric for ikkuna: the share of elements near zero."""
