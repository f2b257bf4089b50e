"""Connections to other libraries; each needs the extra of the same name."""
