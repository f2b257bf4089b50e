"""Backends that pass values to the loggers of other libraries."""
