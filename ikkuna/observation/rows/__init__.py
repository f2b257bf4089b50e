"""Plans of the measurements of a step, and the measured rows."""
