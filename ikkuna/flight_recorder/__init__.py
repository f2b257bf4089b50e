"""The flight recorder: keeps the last sampled steps, writes them to a dump when something goes wrong, and runs a step of a dump again."""
