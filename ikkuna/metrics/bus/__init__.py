"""The bus that delivers messages to subscribers."""
