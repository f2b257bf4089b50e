"""The exchange of measurements between ranks."""
