"""Tensors of a module that are no parameters: they have their values wherever a model computes."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from inference.quantize import optimize_for_decoding
from model.attention.base import LayerSpec
from model.attention.softmax import SoftmaxAttention
from model.build import build_model, materialize
from run import checkpoint
from run import instantiate as instantiation
from run.instantiate import instantiate
from tests.conftest import ROOT, TINY, close, continued, drawn, poisoned_memory, tree_of
from tests.run.forks import ranks
from tests.test_commands import losses_of

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]
HERE = "tests.model.test_buffers"


class Buffered(SoftmaxAttention):
    """Each head's output has a factor, made of buffers of all kinds. Takes the knobs of SoftmaxAttention."""

    persistent = False

    def __init__(self, spec: LayerSpec, **knobs):
        super().__init__(spec, **knobs)
        heads = spec.heads
        buffers = {
            "gain": torch.linspace(0.5, 2.0, heads),
            "rough": torch.ones(1, dtype=torch.bfloat16).expand(heads),
            "drawn": torch.randn(heads),
            "is_even": torch.arange(heads) % 2 == 0,
            "layer": torch.tensor(spec.layer),
        }
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=self.persistent)

    def attend(self, q, k, v, mask):
        factor = torch.where(self.is_even, self.gain * self.rough, self.drawn) + self.layer
        y = super().attend(q, k, v, mask)  # (B, T, H, D)
        return y * factor[:, None].type_as(y)


class Persistent(Buffered):
    persistent = True


class Stray(SoftmaxAttention):
    def __init__(self, spec: LayerSpec, **knobs):
        super().__init__(spec, **knobs)
        self.slopes = torch.linspace(0.5, 2.0, spec.heads)


@pytest.fixture
def ours(monkeypatch):
    """A config may name the classes above."""
    found = instantiation.resolve_target

    def find(path: str, package: str):
        classes = {f"{HERE}.{each.__name__}": each for each in (Buffered, Persistent, Stray)}
        return classes.get(path) or found(path, package)

    monkeypatch.setattr(instantiation, "resolve_target", find)


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("kind", [Buffered, Persistent])
def test_buffers_train_and_decode_with_their_values(kind, ours, trainer_of):
    words = (f"attention._target_={HERE}.{kind.__name__}", "batch_tokens=256", "save_every=3")
    with poisoned_memory():
        trainer = trainer_of(*words, run="run")
    attention = trainer.model.blocks[1].attention
    close(attention.gain, torch.linspace(0.5, 2.0, 4))
    assert attention.rough.tolist() == [1, 1, 1, 1] and attention.is_even.tolist() == [1, 0, 1, 0]
    assert attention.layer == 1 and attention.drawn.unique().numel() == 4

    for _ in range(3):
        trainer.train_step()
    if kind is Persistent:  # as by what is counted or averaged in training
        attention.gain.mul_(1.5)
        attention.is_even.logical_not_()
        attention.layer.add_(2)
    trainer.save()
    expected = buffers_of(trainer.model)
    with poisoned_memory():
        loaded = checkpoint.load_model(checkpoint.newest_checkpoint(trainer.run_dir), "cpu")
        resumed = trainer_of(*words, "resume=true", run="run")
    resumed.restore_or_start(None)
    assert resumed.step == 3
    for model in (loaded, resumed.model):
        close(buffers_of(model), expected, rtol=0, atol=0)

    texts = continued(trainer.model.eval(), PROMPTS, 20)
    for rows, guesses in ((0, 0), (2, 0), (3, 3)):
        assert continued(loaded, PROMPTS, 20, rows=rows, num_draft_tokens=guesses) == texts


@pytest.mark.parametrize("int8", [False, True])
def test_buffers_keep_their_dtype_in_a_model_of_less_precision(int8, ours, tokenizer, tmp_path):
    tree = tree_of("gqa", f"attention._target_={HERE}.Persistent")
    tree["vocab_size"] = tokenizer.vocab_size
    exact = drawn(tree)
    exact.blocks[0].attention.gain[0] = 1.001  # which bf16 does not have
    trees = {"model": tree}
    place = checkpoint.save(tmp_path, 1, exact.state_dict(), trees, tokenizer.files, {})
    model = checkpoint.load_model(place, "cpu", torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    close(buffers_of(model), buffers_of(exact), rtol=0, atol=0)
    optimize_for_decoding(model, int8)
    tokens = torch.tensor([PROMPTS[2]])
    cache = model.new_cache(1, 16, torch.bfloat16, "cpu")
    with torch.no_grad():
        close(model(tokens, cache).float(), exact(tokens), rtol=0, atol=0.2)


def test_a_buffer_that_a_checkpoint_cannot_hold_is_refused(ours, monkeypatch, command):
    odd = torch.zeros(2, dtype=torch.complex128)
    monkeypatch.setattr(torch, "linspace", lambda *_: odd)
    result = command("train.py", *TINY, "steps=1", f"attention._target_={HERE}.Persistent")
    assert result.code == 2 and result.err.count("\n") == 1
    assert "gain: torch.complex128" in result.err and "fix: " in result.err


def test_the_command_refuses_a_tensor_attribute_by_name(ours, command):
    result = command("train.py", *TINY, "steps=1", f"attention._target_={HERE}.Stray")
    assert result.code == 2 and result.err.count("\n") == 1
    assert "(blocks.0.attention.slopes). fix: self.register_buffer('slopes', " in result.err
    assert not Path("runs").exists() and not Path(".cache").exists()  # before anything is prepared


def with_attribute(value) -> dict:
    """The tree of a model whose attentions have this attribute."""

    def make(spec: LayerSpec, **knobs) -> SoftmaxAttention:
        attention = SoftmaxAttention(spec, **knobs)
        attention.extra = value(attention)
        return attention

    tree = tree_of("gqa")
    knobs = {key: value for key, value in tree["attention"].items() if key[0] != "_"}
    return tree | {"attention": partial(make, **knobs)}


STRAYS = {
    "in a list": (lambda _: [1, torch.ones(2)], r"extra\[1\]\)\. fix: .*register_buffer\('extra'"),
    "deeper": (lambda _: {"a": (torch.ones(2),)}, r"extra\['a'\]\[0\]\)\. fix: .*register_buffer"),
    "a parameter in a list": (
        lambda _: [nn.Parameter(torch.ones(2))],
        r"extra\[0\]\)\. fix: nn.ParameterList",
    ),
}


@pytest.mark.parametrize("name", STRAYS)
def test_a_tensor_that_would_stay_behind_is_refused_by_name(name):
    value, message = STRAYS[name]
    with pytest.raises(ValueError, match=rf"blocks\.0\.attention\.{message}"):
        build_model(with_attribute(value))
    build_model(with_attribute(lambda _: [1, {"a": "b"}, None]))


def test_a_buffer_that_is_made_of_parameters_is_refused_by_name():
    def register(attention):
        attention.register_buffer("norms", attention.q_proj.weight.norm(dim=1).detach())

    with pytest.raises(ValueError, match=r"parameters.*\(blocks\.0\.attention\.norms\)\. fix: "):
        build_model(with_attribute(register))


def test_parameters_have_no_memory_and_stay_shared():
    def share(attention):
        shared = nn.Parameter(torch.ones(3), requires_grad=False)
        attention.here = shared
        attention.q_proj.there = shared
        attention.o_proj.bias = attention.v_proj.weight

    model = build_model(with_attribute(share))
    assert all(parameter.is_meta for parameter in model.parameters())
    materialize(model, "cpu", torch.float64)
    attention = model.blocks[1].attention
    assert attention.here is attention.q_proj.there and not attention.here.requires_grad
    assert attention.o_proj.bias is attention.v_proj.weight
    assert {(p.dtype, p.device.type) for p in model.parameters()} == {(torch.float64, "cpu")}
    assert not instantiate(
        tree_of("gqa")
    ).embed.weight.is_meta  # what is built later is built as ever


def test_several_processes_train_with_buffers_as_one_does(ours, command, tmp_path, story):
    words = (*TINY, "steps=2", "save_every=2", "micro_batch=2", "precision=fp32", "optimizer=adamw")
    words += ("data=text", f"data.path={story}", "data.vocab_size=400")
    words += (f"attention._target_={HERE}.Persistent",)
    assert command("train.py", *words, "run_dir=alone").code == 0
    more = {"copies": (), "shards": ("sharded=true", "activation_checkpointing=true")}
    for name, own in more.items():
        train = [sys.executable, ROOT / "train.py", *words, *own, f"run_dir={name}"]
        codes, told = ranks(train, 2, tmp_path)
        assert codes == [0, 0], told
        losses = losses_of(tmp_path / name)
        assert losses == pytest.approx(losses_of(tmp_path / "alone"), abs=1e-5)
