"""Connects the flight recorder with an exporter."""
