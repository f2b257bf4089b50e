"""Mistakes in what a training minimises, as the graph of autograd between the objective and the parameters shows them."""
