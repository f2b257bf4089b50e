"""Recognises steps that draw the same random numbers as earlier ones."""

import torch


class RandomNumbers:
    """Compares the state of the random generators of torch at the beginning of steps.

    The states of the host and of the present CUDA device are read; the latter is a seed and a position on the host.

    Examples
    --------
    >>> numbers, found = RandomNumbers(), []
    >>> with torch.random.fork_rng():
    ...     for seed in (1, 1, 2, 2):
    ...         _ = torch.manual_seed(seed)
    ...         numbers.step_opened()
    ...         _ = torch.rand(1) if seed == 1 else None
    ...         found.append(numbers.are_repeated())
    >>> found
    [False, True, False, False]
    """

    def __init__(self) -> None:
        self._before = self._opened = 0

    def step_opened(self) -> None:
        """Read the state at the beginning of a step."""
        self._before, self._opened = self._opened, _state()

    def are_repeated(self) -> bool:
        """Return whether the open step began in the same state as the one before, and has drawn random numbers since."""
        return self._before == self._opened != _state()


def _state() -> int:
    """Return a hash of the states."""
    states: list[object] = [torch.default_generator.get_state().numpy().tobytes()]
    if torch.cuda.is_initialized():
        device = torch.cuda.default_generators[torch.cuda.current_device()]
        states += [device.initial_seed(), device.get_offset()]
    return hash(tuple(states))
