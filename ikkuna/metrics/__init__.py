"""Messages, the bus that delivers them, and the subscribers that turn them into metrics."""
