"""Everything that touches torch's hooks."""
