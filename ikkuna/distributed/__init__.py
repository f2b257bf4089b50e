"""Training in several processes: rendezvous, gathering and merging of the measurements of all ranks."""
