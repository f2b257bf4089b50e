"""The flight recorder keeps the last sampled steps, and writes them to dumps."""
