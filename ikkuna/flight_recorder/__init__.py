"""The flight recorder keeps the last sampled steps, writes them to dumps, and runs a step of a dump again."""
