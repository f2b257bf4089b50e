"""The observed model: its roots, modules and parameters."""
