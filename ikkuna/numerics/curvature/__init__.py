"""The curvature of a loss: products with its Hessian, and their spectra."""

from ikkuna.numerics.curvature.hessian_product import HessianProduct

__all__ = ["HessianProduct"]
