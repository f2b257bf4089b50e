"""The curvature of a loss: products with its Hessian, and their spectra."""

from ikkuna.numerics.curvature.hessian_product import HessianProduct, Trace, hutchinson_trace

__all__ = ["HessianProduct", "Trace", "hutchinson_trace"]
