"""The states of the random generators of torch, numpy and Python."""

import ctypes
import pickle
import random
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ikkuna.support.torch_internals import dispatch_modes

_MT19937_BYTES = 4 * 624 + 4  # the key and the position


class RandomStates(NamedTuple):
    """The states of the global random generators at one moment.

    Parameters
    ----------
    torch_state : Tensor
        Of torch on the host.
    device_states : dict of str to Tensor
        Of the devices of an accelerator.
    numpy_state : tuple
        Of ``numpy.random``.
    python_state : tuple
        Of ``random``.

    Examples
    --------
    >>> states = RandomReader().read()
    >>> first = random.random(), torch.rand(1).item()
    >>> RandomStates.of_arrays(states.arrays()).restore()
    >>> first == (random.random(), torch.rand(1).item())
    True
    >>> states.equals(RandomReader().read()), states.equals(states)
    (False, True)
    """

    torch_state: torch.Tensor
    device_states: dict[str, torch.Tensor]
    numpy_state: Any
    python_state: Any

    def restore(self) -> None:
        """Set the global random generators to these states."""
        torch.default_generator.set_state(self.torch_state)
        for name, state in self.device_states.items():
            device = torch.device(name)
            torch.get_device_module(device).default_generators[device.index].set_state(state)
        np.random.set_state(self.numpy_state)
        random.setstate(self.python_state)

    def seeded(self, seed: int) -> "RandomStates":
        """Return the states that the same generators would have after they are seeded; nothing is seeded.

        Parameters
        ----------
        seed : int
            The seed.
        """
        return RandomStates(
            torch.Generator("cpu").manual_seed(seed).get_state(),
            {name: torch.Generator(name).manual_seed(seed).get_state() for name in self.device_states},
            np.random.RandomState(seed).get_state(),
            random.Random(seed).getstate(),
        )

    def equals(self, other: "RandomStates") -> bool:
        """Return whether the same random numbers would follow."""
        return (
            self.python_state == other.python_state
            and pickle.dumps(self.numpy_state) == pickle.dumps(other.numpy_state)
            and torch.equal(self.torch_state, other.torch_state)
            and self.device_states.keys() == other.device_states.keys()
            and all(torch.equal(state, other.device_states[name]) for name, state in self.device_states.items())
        )

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the states as arrays of numbers."""
        _, key, position, has_gauss, gauss = self.numpy_state
        version, numbers, python_gauss = self.python_state
        found: dict[str, NDArray[Any]] = {
            "torch": self.torch_state.numpy().copy(),
            "numpy_key": np.array(key, np.uint32),
            "numpy_rest": np.array([position, has_gauss, gauss], np.float64),
            "python": np.array(numbers, np.uint64),
            "python_rest": np.array([version, np.nan if python_gauss is None else python_gauss], np.float64),
        }
        return found | {f"device {name}": state.cpu().numpy().copy() for name, state in self.device_states.items()}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> "RandomStates":
        """Return the states that :meth:`arrays` has returned.

        Raises
        ------
        ValueError or KeyError
            If they are of something else.
        """
        position, has_gauss, gauss = arrays["numpy_rest"].tolist()
        if arrays["numpy_key"].shape != (624,) or not 0 <= position <= 624:  # numpy reads beyond its key otherwise
            raise ValueError("the state of numpy.random has another size")
        version, python_gauss = arrays["python_rest"].tolist()
        devices = {name.removeprefix("device "): array for name, array in arrays.items() if name.startswith("device ")}
        return cls(
            torch.from_numpy(arrays["torch"].copy()),
            {name: torch.from_numpy(array.copy()) for name, array in devices.items()},
            ("MT19937", arrays["numpy_key"], int(position), int(has_gauss), gauss),
            (int(version), tuple(arrays["python"].tolist()), None if np.isnan(python_gauss) else python_gauss),
        )


class RandomReader:
    """Reads the states of the random generators.

    The state of numpy takes 60 µs to read, so it is read only if the memory of its generator has changed.

    Parameters
    ----------
    devices : iterable of torch.device
        The devices of an accelerator whose generators are read; their states are on the host, so nothing waits.
    """

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self._devices = [device for device in devices if _has_generators(device)]
        self._numpy: Any = None
        self._memory = b""

    def read(self) -> RandomStates:
        """Return the present states."""
        states = {}
        for device in self._devices:
            index = device.index if device.index is not None else torch.get_device_module(device).current_device()
            generator = torch.get_device_module(device).default_generators[index]
            states[f"{device.type}:{index}"] = generator.get_state()
        return RandomStates(torch.default_generator.get_state(), states, self._read_numpy(), random.getstate())

    def _read_numpy(self) -> Any:
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # numpy's stubs lack it
        address = generator.ctypes.state_address if isinstance(generator, np.random.MT19937) else None
        memory = b"" if address is None else ctypes.string_at(address, _MT19937_BYTES)
        # the second of two normal numbers is stored outside of this memory, so a state with one is read again
        if self._numpy is None or not memory or memory != self._memory or self._numpy[3]:
            self._numpy, self._memory = np.random.get_state(), memory
        return self._numpy


def _has_generators(device: torch.device) -> bool:
    if device.type in ("cpu", "meta"):
        return False
    return bool(getattr(torch.get_device_module(device), "default_generators", ()))


class RandomNumbers:
    """Compares the state of the random generators of torch at the beginning of steps of the same optimizers.

    The states of the host and of the present CUDA device are read; the latter is a seed and a position on the host.

    Examples
    --------
    >>> numbers, found = RandomNumbers(), []
    >>> with torch.random.fork_rng():
    ...     for seed in (1, 1, 2, 2):
    ...         _ = torch.manual_seed(seed)
    ...         numbers.step_opened()
    ...         _ = torch.rand(1) if seed == 1 else None
    ...         found.append(numbers.are_repeated(()))
    >>> found
    [False, True, None, None]
    """

    def __init__(self) -> None:
        self._before: dict[tuple[int, ...], object] = {}
        self._opened: object = None

    def step_opened(self) -> None:
        """Read the state at the beginning of a step."""
        self._opened = _states_of_torch()

    def are_repeated(self, optimizers: tuple[int, ...]) -> bool | None:
        """Return whether the open step began in the same state as the one before of the same optimizers.

        ``None`` if the step has drawn no random numbers; such a step is not compared with others either.
        """
        if self._opened == _states_of_torch():
            return None
        before, self._before[optimizers] = self._before.get(optimizers), self._opened
        return before == self._opened


def _states_of_torch() -> object:
    """Return what is equal for equal states of torch; an object that equals no other where tensors may be fake."""
    if dispatch_modes():
        return object()
    state = torch.default_generator.get_state().numpy().tobytes()
    if not torch.cuda.is_initialized():
        return state
    device = torch.cuda.default_generators[torch.cuda.current_device()]
    return state, device.initial_seed(), device.get_offset()
