"""Everything that draws pictures."""
