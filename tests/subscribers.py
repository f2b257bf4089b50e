"""Every installed subscriber, each in a way that exercises all it takes: the list that contract tests run over."""

from ikkuna.export import subscriber as installed
from ikkuna.export.messages.kinds import MODULE_KINDS

EVERY_SUBSCRIBER = {}

for kind in MODULE_KINDS:
    for name in ("NormSubscriber", "MeanSubscriber", "VarianceSubscriber"):
        EVERY_SUBSCRIBER[f"{name}-{kind}"] = lambda n=name, k=kind, **o: getattr(installed, n)(k, **o)
EVERY_SUBSCRIBER["NormSubscriber-p3"] = lambda **o: installed.NormSubscriber("weights", p=3, **o)
EVERY_SUBSCRIBER["RatioSubscriber"] = lambda **o: installed.RatioSubscriber(["weight_updates", "weights"], **o)
EVERY_SUBSCRIBER["LossSubscriber"] = lambda **o: installed.LossSubscriber(**o)
EVERY_SUBSCRIBER["TrainAccuracySubscriber"] = lambda **o: installed.TrainAccuracySubscriber(**o)

NEEDS = {}
"""For those that take other subscribers' results: name → the factories of these."""
