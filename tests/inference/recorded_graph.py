"""Emulate CUDA graphs on a CPU by recording operations and replaying them on the same tensors."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("aten::_local_scalar_dense", "aten::equal")  # .item(), bool(), int(), equal()


class RecordedGraph(TorchDispatchMode):
    """Replaces torch.cuda.CUDAGraph: `replay` repeats the recorded operations on the same memory.

    As with a real graph, a new value has an effect only if it is written to a recorded tensor. If
    the host reads a value during recording, CUDA's error is raised.
    """

    def __init__(self):
        super().__init__()
        self.operations = []
        self.num_replays = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.name().startswith(READS):
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")
        if func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        self.operations.append((func, args, kwargs, result))
        return result

    def replay(self) -> None:
        self.num_replays += 1
        for func, args, kwargs, result in self.operations:
            again = func(*args, **kwargs)
            for old, new in zip(tensors_of(result), tensors_of(again), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def tensors_of(result: object) -> list[Tensor]:
    """The tensors in an operation's result."""
    results = result if isinstance(result, (list, tuple)) else [result]
    return [x for x in results if isinstance(x, Tensor)]


class Streams:
    """Replaces the current stream of torch.cuda, and the contexts that change it."""

    def __init__(self):
        self.current = mock.Mock()

    @contextmanager
    def stream(self, stream: mock.Mock) -> Iterator[None]:
        previous = self.current
        self.current = stream
        try:
            yield
        finally:
            self.current = previous

    @contextmanager
    def graph(self, graph: RecordedGraph, stream: mock.Mock) -> Iterator[None]:
        """Record a graph; as in torch, an error causes a second one and leaves `stream` current."""
        previous = self.current
        self.current = stream
        try:
            with graph:
                yield
        except RuntimeError as error:
            message = "CUDA error: operation failed due to a previous error during capture"
            raise RuntimeError(message) from error
        self.current = previous


@contextmanager
def recorded_graphs() -> Iterator[None]:
    """Make torch.cuda record CPU operations as graphs."""
    streams = Streams()
    replacements = {
        "CUDAGraph": RecordedGraph,
        "graph": streams.graph,
        "Stream": mock.Mock,
        "stream": streams.stream,
        "current_stream": lambda: streams.current,
    }
    with ExitStack() as stack:
        # As on a GPU: NumPy's argmax, which serves a CPU, would not be recorded.
        torch_argmax = partial(torch.argmax, dim=-1)
        stack.enter_context(mock.patch("inference.sampling.argmax", torch_argmax))
        for name, replacement in replacements.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, replacement))
        yield
