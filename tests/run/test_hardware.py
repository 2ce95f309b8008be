"""Which device is picked, and how fp32 is multiplied on it."""

import pytest
import torch

from run import hardware
from tests.conftest import TINY


@pytest.mark.parametrize(
    ("wanted", "usable", "picked"),
    [
        ("auto", (), "cpu"),
        ("auto", ("mps",), "mps"),
        ("auto", ("cuda", "mps"), "cuda"),
        ("cpu", ("cuda", "mps"), "cpu"),
        ("cuda", ("mps",), None),
        ("mps", (), None),
    ],
)
def test_auto_is_the_best_device_that_torch_can_use(monkeypatch, wanted, usable, picked):
    for kind, backend in (("cuda", torch.cuda), ("mps", torch.backends.mps)):
        monkeypatch.setattr(backend, "is_available", lambda kind=kind: kind in usable)
    if picked is None:
        with pytest.raises(ValueError, match="fix: what python -m"):
            hardware.pick_device(wanted)
    else:
        assert hardware.pick_device(wanted) == torch.device(picked)


@pytest.mark.parametrize(("kind", "precision"), [("cpu", "highest"), ("cuda", "high")])
def test_only_training_on_a_gpu_multiplies_fp32_in_tf32(kind, precision):
    assert torch.get_float32_matmul_precision() == "highest"
    try:
        hardware.prepare_for_training(torch.device(kind))
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision("highest")


def test_hints_of_inductor_about_precision_are_no_error(monkeypatch):
    from torch._inductor import compile_fx

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    compile_fx._warn_tf32_disabled.__wrapped__()


def test_training_prepares_the_device_that_it_has_picked(command, monkeypatch):
    prepared = []
    monkeypatch.setattr(hardware, "prepare_for_training", prepared.append)
    words = (*TINY, "data=recall", "data.pairs=[2]", "context=16", "batch_tokens=64", "steps=1")
    command("train.py", *words).succeeded()
    assert prepared == [torch.device("cpu")]
