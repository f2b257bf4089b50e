"""The cross-entropy that a usual initialisation of the last layer explains."""

import math
from collections.abc import Sequence

__all__ = ["initial_cross_entropy", "initial_logit_deviation"]


_MARGIN = 1.25  # of the scale of random weights


def initial_logit_deviation(shape: Sequence[int], weight_rms: float) -> float:
    r"""Return the standard deviation of logits that the last layer gives to features with a mean square of 1.

    .. math:: s = w \sqrt{n_\text{in}}

    with the root mean square :math:`w` of the weights; 0 if these are above the largest scale of a usual initialisation,
    :math:`w > 1.25 \sqrt{2 / \min(n_\text{in}, n_\text{out})}`, which is that of He et al. (2015) with the smaller number of units.
    An initialisation by the number of outputs, which EfficientNet and MobileNet have, gives large logits if there are few classes.

    Parameters
    ----------
    shape : sequence of int
        The shape (out, in, …) of the weight.
    weight_rms : float
        The root mean square of the weights.

    Examples
    --------
    >>> round(initial_logit_deviation((10, 1000), 1 / 3000**0.5), 3)  # torch.nn.Linear
    0.577
    >>> round(initial_logit_deviation((10, 1000), 1 / 30**0.5), 3)  # uniform by the number of outputs
    5.774
    >>> initial_logit_deviation((10, 1000), 3.0)
    0.0
    """
    fan_in, fan_out = math.prod(shape[1:]), shape[0]
    usual = math.sqrt(2 / max(min(fan_in, fan_out), 1))
    return math.sqrt(fan_in) * weight_rms if weight_rms <= _MARGIN * usual else 0.0


def initial_cross_entropy(classes: int, deviation: float) -> float:
    r"""Return an upper bound of the expected cross-entropy of normally distributed logits that do not depend on the labels.

    .. math:: \log C + \min\left(s^2 / 2, s \sqrt{2 \log C}\right)

    The first bound is Jensen's inequality for the mean of the exponentials,
    the second is the expected maximum of :math:`C` normal variables.

    Parameters
    ----------
    classes : int
        The number :math:`C` of classes.
    deviation : float
        The standard deviation :math:`s` of the logits.

    Examples
    --------
    >>> round(initial_cross_entropy(10, 0.0), 3), round(initial_cross_entropy(10, 10.0), 3)
    (2.303, 23.762)
    """
    guess = math.log(classes)
    return guess + min(deviation**2 / 2, deviation * math.sqrt(2 * guess))
