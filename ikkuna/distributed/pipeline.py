"""The names of the modules in the stages of a pipeline."""

from collections.abc import Collection, Iterable, Mapping

__all__ = ["same_names"]

_SHOWN = 3


def same_names(ranks: Iterable[Mapping[str, Collection[str]]]) -> str:
    """Return why stages cannot be told apart; an empty string if they can.

    Parameters
    ----------
    ranks : iterable of mapping
        For each rank the names of the modules of each of its stages, by the stage's number.

    Examples
    --------
    >>> same_names([{"0": ["embedding", "blocks.0"]}, {"1": ["blocks.1"]}, {"0": ["embedding", "blocks.0"]}])
    ''
    >>> same_names([{"0": ["0", "1"]}, {"1": ["0"]}])
    "stages 0 and 1 of the pipeline both have modules named '0'; add each under a name of its own: add_modules(('a name', stage_module))"
    """
    stage_of: dict[str, str] = {}
    for stages in ranks:
        for stage, names in stages.items():
            shared = [name for name in names if stage_of.setdefault(name, stage) != stage]
            if shared:
                shown = ", ".join(map(repr, shared[:_SHOWN]))
                return (
                    f"stages {stage_of[shared[0]]} and {stage} of the pipeline both have modules named {shown}; "
                    "add each under a name of its own: add_modules(('a name', stage_module))"
                )
    return ""
