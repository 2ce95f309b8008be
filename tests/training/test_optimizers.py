"""Any optimizer trains, resumes bit for bit, and takes no step that is not finite."""

import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import SGD, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import training.optimizers
from run import config
from run.errors import IntegrityError
from run.instantiate import instantiate
from tests.conftest import close, settings_of, weights
from training.optimizers import Lion, Muon, copy_all_where, load_state_by_name, state_by_name


class Novel(Optimizer):
    """State of every kind, under keys that no other optimizer has; knows nothing of found_inf."""

    def __init__(self, params, lr: float, signed: bool, mode: str):
        super().__init__(params, {"lr": lr, "signed": signed, "mode": mode})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["drift"] = torch.zeros_like(p)
                    state["largest"] = [torch.zeros((), dtype=torch.float64), torch.zeros(3)]
                    state["count"] = torch.zeros((), dtype=torch.int64)
                    state["count_int"] = 0
                    state["phase"] = group["mode"]
                state["count_int"] += 1
                state["count"] += 1
                state["phase"] = group["mode"] + str(state["count_int"] % 2)
                state["drift"].mul_(0.9).add_(p.grad)
                state["largest"][0].fill_(max(state["largest"][0], p.grad.abs().max().item()))
                drift = state["drift"].sign() if group["signed"] else state["drift"]
                rate = group["lr"] / (1 + state["count_int"] / 10)
                p.add_(drift, alpha=-rate if state["phase"] != "slow1" else -rate / 2)
                p.mul_(1 - 0.01 * group["lr"])


def novel(model: nn.Module, *, lr: float, signed: bool, mode: str, limit: float | None):
    return [Novel(model.parameters(), lr, signed, mode)]


def sgd(model: nn.Module, *, lr: float):
    return [SGD(model.parameters(), lr=lr, momentum=0.9)]


OVERRIDES = {
    "novel": (
        "optimizer=adamw",
        "~optimizer.betas",
        "~optimizer.weight_decay",
        "optimizer._target_=training.optimizers.novel",
        "optimizer.lr=1e-3",
        "+optimizer.signed=true",
        "+optimizer.mode=slow",
        "+optimizer.limit=null",
    ),
    "sgd": (
        "optimizer=adamw",
        "~optimizer.betas",
        "~optimizer.weight_decay",
        "optimizer._target_=training.optimizers.sgd",
        "optimizer.lr=0.1",
    ),
    "lion": ("optimizer=lion",),
    "adamw": ("optimizer=adamw",),
    "muon": ("optimizer=muon",),
}


@pytest.fixture(autouse=True)
def written_in_the_package(monkeypatch):
    """As if the optimizers of this file stood in training/optimizers.py."""
    for function in (novel, sgd):
        monkeypatch.setattr(function, "__module__", "training.optimizers")
        monkeypatch.setattr(training.optimizers, function.__name__, function, raising=False)


def states(trainer) -> dict[str, dict[str, object]]:
    return state_by_name(trainer.optimizers, trainer.model, trainer.ranks)


def same(one, other) -> bool:
    """To the bit, and of the same kinds."""
    leaves, nesting = tree_flatten(one)
    others, others_nesting = tree_flatten(other)
    assert nesting == others_nesting
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b and type(a) is type(b)
        for a, b in zip(leaves, others, strict=True)
    )


@pytest.mark.parametrize("name", OVERRIDES)
def test_any_optimizer_resumes_bit_for_bit(trainer_of, name):
    whole = trainer_of(*OVERRIDES[name])
    for _ in range(6):
        whole.train_step()
    cut = trainer_of(*OVERRIDES[name], run="cut")
    for _ in range(3):
        cut.train_step()
    cut.save()
    resumed = trainer_of(*OVERRIDES[name], "resume=true", run="cut")
    resumed.restore_or_start(None)
    assert same(weights(resumed), weights(cut)) and same(states(resumed), states(cut))
    for _ in range(3):
        resumed.train_step()
    assert same(weights(resumed), weights(whole)) and same(states(resumed), states(whole))


def test_an_optimizer_without_state_resumes(trainer_of):
    overrides = OVERRIDES["sgd"]
    for resume in ("false", "true"):
        trainer = trainer_of(*overrides, f"resume={resume}", run="run")
        for optimizer in trainer.optimizers:
            optimizer.param_groups[0]["momentum"] = 0
        trainer.restore_or_start(None)
        trainer.train_step()
        trainer.save()
    assert trainer.step == 2 and states(trainer) == {}


FOREIGN = {
    "no key": lambda state: state.pop("drift"),
    "a key more": lambda state: state.update(more=torch.zeros(())),
    "another shape": lambda state: state.update(drift=torch.zeros(3)),
    "another dtype": lambda state: state.update(drift=state["drift"].double()),
    "a number for a tensor": lambda state: state.update(drift=0.0),
    "a tensor for a number": lambda state: state.update(count_int=torch.zeros(())),
    "a shorter list": lambda state: state["largest"].pop(),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_the_state_of_another_optimizer_is_refused(trainer_of, case):
    trainer = trainer_of(*OVERRIDES["novel"])
    trainer.train_step()
    state = states(trainer)
    load_state_by_name(trainer.optimizers, trainer.model, state)
    FOREIGN[case](state["embed.weight"])
    with pytest.raises(IntegrityError, match=r"^not this optimizer's state .*fix: "):
        load_state_by_name(trainer.optimizers, trainer.model, state)


@pytest.mark.parametrize("state", [0, {}, {"embed.weight": {}}, {"embed.weight": 1}])
def test_what_is_no_state_is_refused(trainer_of, state):
    trainer = trainer_of(*OVERRIDES["lion"])
    with pytest.raises(IntegrityError, match="other parameters"):
        load_state_by_name(trainer.optimizers, trainer.model, state)


def test_a_state_that_no_checkpoint_can_hold_is_refused_at_the_first_save(trainer_of):
    trainer = trainer_of(*OVERRIDES["novel"])
    trainer.train_step()
    trainer.optimizers[0].state[trainer.model.embed.weight]["phase"] = trainer
    with pytest.raises(TypeError, match=r"embed.weight holds a Trainer"):
        trainer.save()


def test_options_may_be_flags_texts_and_null():
    assert config.find_problems(settings_of(*OVERRIDES["novel"]), world_size=1) == []
    (problem,) = config.find_problems(
        settings_of(*OVERRIDES["novel"], "optimizer.lr=-1"), world_size=1
    )
    assert problem.startswith("optimizer.lr must be a number of at least 0 (got -1)")


@pytest.mark.parametrize(
    "override",
    [
        "signed=1",
        "signed=yes_please",
        "mode=3",
        "mode=null",
        "limit=x",
        "lr=x",
        "lr=null",
        "lr=true",
    ],
)
def test_an_option_of_another_kind_is_refused(override):
    settings = settings_of(*OVERRIDES["novel"], f"optimizer.{override}")
    with pytest.raises(ValueError, match=rf"optimizer\.{override.partition('=')[0]} must be "):
        instantiate(settings["optimizer"], "training", "optimizer")


@pytest.mark.parametrize("betas", ["[0.9,x]", "[0.9,null]", "[0.9,true]"])
def test_betas_are_numbers(betas):
    settings = settings_of("optimizer=lion", f"optimizer.betas={betas}")
    with pytest.raises(ValueError, match="betas must be "):
        instantiate(settings["optimizer"], "training")


@pytest.mark.parametrize("name", OVERRIDES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("first", [False, True])
def test_a_step_that_is_not_finite_does_nothing(trainer_of, name, value, first, capsys):
    trainer = trainer_of(*OVERRIDES[name])
    if not first:
        trainer.train_step()
    before, forward = weights(trainer), trainer.parallel
    state = states(trainer)
    trainer.parallel = lambda *batch: [value * result for result in forward(*batch)]
    trainer.train_step()
    trainer.parallel = forward
    trainer.train_step()
    assert same(weights(trainer), before)
    if not first:
        assert same(states(trainer), state)
    for action in (trainer.log_metrics, trainer.save):
        with pytest.raises(SystemExit, match="4"):
            action()
    assert "training diverged" in capsys.readouterr().err


def test_lion_steps_as_the_paper_does():
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 3), (7,), (2, 4)]
    lr, beta1, beta2, decay = 0.03, 0.9, 0.99, 0.5
    ours = [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        for shape in shapes
    ]
    theirs = [p.detach().clone() for p in ours]
    momenta = [torch.zeros_like(weight) for weight in theirs]
    optimizer = Lion(ours, lr=lr, betas=(beta1, beta2), weight_decay=decay)
    for _ in range(5):
        for number, p in enumerate(ours):
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            update = torch.sign(beta1 * momenta[number] + (1 - beta1) * p.grad)
            theirs[number] = theirs[number] - lr * (update + decay * theirs[number])
            momenta[number] = beta2 * momenta[number] + (1 - beta2) * p.grad
        optimizer.step()
    for p, weight, momentum in zip(ours, theirs, momenta, strict=True):
        close(p.detach(), weight, rtol=1e-14, atol=1e-14)
        close(optimizer.state[p]["exp_avg"], momentum, rtol=1e-14, atol=1e-14)


def muon_by_the_definition(weight, momentum, grad, lr: float, beta: float, decay: float):
    """One step of one matrix: Keller Jordan's post, with the scale of Liu, 2502.16982 -> both."""
    momentum = beta * momentum + (1 - beta) * grad
    update = beta * momentum + (1 - beta) * grad
    x = update / update.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    step = 0.2 * max(weight.shape) ** 0.5 * x
    return (1 - lr * decay) * weight - lr * step, momentum


@pytest.mark.parametrize("max_batched", [2**28, 40, 1])  # all at once, a few, each alone
def test_muon_steps_each_matrix_as_the_definition_does(monkeypatch, max_batched):
    monkeypatch.setattr(training.optimizers, "MAX_BATCHED_PARAMS", max_batched)
    monkeypatch.setattr(training.optimizers, "multiplies_bf16", lambda device: False)
    generator = torch.Generator().manual_seed(0)
    ours = [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        for shape in [(5, 3), (3, 5), (4, 4), (5, 3), (2, 7), (3, 5)]
    ]
    theirs = [p.detach().clone() for p in ours]
    momenta = [torch.zeros_like(weight) for weight in theirs]
    optimizer = Muon(ours, lr=0.03, momentum=0.85, weight_decay=0.5)
    for _ in range(3):
        for number, p in enumerate(ours):
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            theirs[number], momenta[number] = muon_by_the_definition(
                theirs[number], momenta[number], p.grad, 0.03, 0.85, 0.5
            )
        optimizer.step()
    close([p.detach() for p in ours], theirs)
    close([optimizer.state[p]["momentum_buffer"] for p in ours], momenta)


@pytest.mark.parametrize("condition", [False, True])
def test_tensors_are_copied_together_as_where_copies_each(condition):
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 3), (7,), (2, 4)]
    sources, targets = ([torch.randn(s, generator=generator) for s in shapes] for _ in range(2))
    sources[1][:2] = torch.tensor([-0.0, 1e-45])
    targets[0][0] = torch.tensor([math.nan, math.inf, -0.0])
    expected = [
        torch.where(torch.tensor(condition), *pair) for pair in zip(sources, targets, strict=True)
    ]
    copy_all_where(torch.tensor(condition).int(), sources, targets)
    for target, result in zip(targets, expected, strict=True):
        assert torch.equal(target.view(torch.int32), result.view(torch.int32))


@pytest.mark.parametrize("kind", [Muon, Lion])
def test_a_step_on_a_gpu_launches_as_much_for_many_matrices_as_for_few(kind):
    options = {Muon: {"momentum": 0.85}, Lion: {"betas": (0.9, 0.95)}}[kind]
    launches = []
    for num_matrices in (2, 6):
        with FakeTensorMode():
            matrices = [
                nn.Parameter(torch.empty(shape, device="cuda"))
                for shape in [(5, 3), (3, 5)] * num_matrices
            ]
            optimizer = kind(matrices, lr=0.03, weight_decay=0.1, **options)
            optimizer.found_inf = torch.empty((), device="cuda")
            for p in matrices:
                p.grad = torch.empty_like(p)
            optimizer.step()  # makes the state
            with Operations() as operations:
                optimizer.step()
        launches.append(operations.names)
    assert launches[0] == launches[1]


class Operations(TorchDispatchMode):
    """Collects the names of torch's operations, without views."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if operation.namespace == "aten" and not operation.is_view:
            self.names.append(operation._schema.name)
        return result


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_every_optimizer_learns(trainer_of, name):
    rate = ["optimizer.lr=3e-3"] if name == "lion" else []  # a text learned by heart wants more
    trainer = trainer_of(*OVERRIDES[name], *rate, "steps=60", "batch_tokens=256")
    losses = []
    for _ in range(60):
        trainer.train_step()
        losses.append(trainer.loss_sum.item() / 256)
        trainer.loss_sum.zero_()
    assert max(losses[-5:]) < losses[0] / 2
