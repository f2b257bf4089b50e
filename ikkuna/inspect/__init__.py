"""Functions for the prompt: snapshots, probes and figures; nothing that runs during training imports them."""
