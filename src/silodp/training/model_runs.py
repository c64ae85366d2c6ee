"""Runs of a model: how it is called, with which random numbers, and the error that says what it raised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from silodp.data.inputs import NamedArrays
from silodp.errors import SilodpError
from silodp.text import describe_exception
from silodp.training.model_state import model_error


def call_model(model: nn.Module, x: Any) -> Any:
    """Return the outputs of a model: several named inputs are its keyword arguments."""
    return model(**x) if isinstance(x, NamedArrays) else model(x)


@contextmanager
def describe_failures(model: nn.Module) -> Iterator[None]:
    """Raise an error that names the model in place of whatever it raises, except for a `SilodpError`."""
    try:
        yield
    except SilodpError:
        raise
    except (Exception, SystemExit) as error:
        raise model_error(
            f"the model ({type(model).__name__}) raised {describe_exception(error)}: correct its forward.",
            "model.raised",
        ) from error


def draw_seed(generator: torch.Generator) -> int:
    """Draw a seed for `seeded`."""
    return int(torch.randint(1 << 62, (), generator=generator))


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed torch's global generators for the time of the context, because dropout takes no generator.

    Args:
        device: The device that the model is on.
        seed: The seed of the CPU's generator, and of the device's.
    """
    if device.type == "cuda":
        with torch.random.fork_rng(devices=[device]):
            torch.manual_seed(seed)
            yield
        return
    # torch.manual_seed also records, with a stack trace, that GPUs used later are to be seeded, which takes longer than
    # a small step: seed the CPU's generator directly.
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)
