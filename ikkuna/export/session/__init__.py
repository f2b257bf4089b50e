"""The open state of an exporter, composed of its parts."""
