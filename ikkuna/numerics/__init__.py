"""Pure functions of tensors: the mathematics behind every metric, with no knowledge of how data reaches them."""
