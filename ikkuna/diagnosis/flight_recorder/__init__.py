"""The flight recorder: keeps the last sampled steps, and writes them to a dump when something goes wrong."""
