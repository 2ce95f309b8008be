"""Decoding on a fake GPU: synchronizations, mixed devices, captured steps and graphs.

See tests/gpu/fake_cuda.py. The number next to a function is the number of host synchronizations in
this function.
"""

from pathlib import Path
from unittest import mock

import pytest
import torch

from inference.batch import Sequence
from inference.engine import Engine
from tests.conftest import EACH_MECHANISM
from tests.gpu.fake_checks import CUDA, SAMPLER, check, decoding_model
from tests.gpu.fake_cuda import FakeGPU

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Prompts of different lengths for a batch of two rows.
PROMPTS = ([0, 0, 0, 0, 0], [4, 5, 0, 0], [6, 7])
# Decoding modes: the model's dtype, whether weights are int8, the cache's dtype, and the expected
# synchronizations for two tokens after each prompt.
DECODING = {
    "cached": ("bf16", False, torch.bfloat16, {"Engine.generate": 4}),
    "int8": ("bf16", True, torch.int8, {"Engine.generate": 4}),
    "fp16": ("fp16", False, torch.float16, {"Engine.generate": 4}),
    "uncached": ("fp32", False, None, {"Engine.generate": 6}),
}
WAITING = {
    "item": lambda x, host: x[0, 0].item(),
    "bool": lambda x, host: bool(x.any()),
    "tolist": lambda x, host: x.tolist(),
    "equal": lambda x, host: x.equal(x),
    "to the host": lambda x, host: x.cpu(),
    "into host memory": lambda x, host: host.copy_(x, non_blocking=True),
    "to the device": lambda x, host: host.pin_memory().to("cuda"),
    "from unpinned memory": lambda x, host: host.to("cuda", non_blocking=True),
    "indices on the host": lambda x, host: x[host[0].long()],
    "a list": lambda x, host: torch.tensor([1, 2], device="cuda"),
}


@pytest.mark.parametrize("what", WAITING)
def test_operations_that_synchronize_with_the_host_are_counted(gpu, what):
    for is_inference in (False, True):
        gpu.reset()
        with torch.inference_mode(is_inference):
            WAITING[what](torch.zeros(2, 3, device="cuda"), torch.zeros(2, 3))
        assert gpu.waits.total() == 1


def check_decoding(gpu: FakeGPU, variant: str, way: str) -> None:
    """Generate two tokens after each of three prompts, in batches of two."""
    dtype, is_int8, cache_dtype, waits = DECODING[way]
    model = decoding_model(variant, DTYPES[dtype], int8=is_int8)
    cache = None if cache_dtype is None else model.new_cache(2, 16, cache_dtype, CUDA)
    sequences = [Sequence([*prompt], 2) for prompt in PROMPTS]
    gpu.reset()
    for _ in Engine(model, SAMPLER, cache).generate(sequences):
        pass
    check(gpu, waits, DTYPES[dtype])


@pytest.mark.parametrize("variant", EACH_MECHANISM)
def test_decoding_synchronizes_only_in_listed_functions(gpu, variant):
    check_decoding(gpu, f"{variant} model.depth=1", "cached")


@pytest.mark.parametrize(
    "variant, way",
    [
        ("mla model.depth=1 model.softcap=15.0", "int8"),
        ("mla model.depth=1 model.tied=true", "uncached"),
        ("gdn ffn=relu2", "fp16"),
    ],
)
def test_int8_fp16_and_uncached_decoding_synchronize_only_in_listed_functions(gpu, variant, way):
    check_decoding(gpu, variant, way)


@pytest.mark.parametrize("variant", EACH_MECHANISM)
def test_the_decode_step_of_every_variant_can_be_captured(gpu, variant):
    model = decoding_model(f"{variant} model.depth=1", torch.bfloat16, int8=True)
    engine = Engine(model, SAMPLER, model.new_cache(2, 16, torch.bfloat16, CUDA))
    assert engine.can_capture
    engine.capture()
    assert engine.graph is not None


def test_commands_run_on_a_gpu(gpu, command, story):
    """Trains, resumes and generates with the commands."""
    text = ("data=text", f"data.path={story}", "data.vocab_size=400")
    sizes = ("model=tiny", "model.depth=1", "context=16", "batch_tokens=128", "eval_tokens=129")
    options = (
        *sizes,
        *text,
        "device=cuda",
        "micro_batch=4",
        "compile=false",
        "log_every=1",
        "eval_every=1",
    )
    result = command("train.py", *options, "steps=1").succeeded()
    assert "1 x cuda, torch.bfloat16" in result.err
    (run,) = Path("runs").iterdir()
    again = (*options, "steps=2", f"run_dir={run}", "resume=true")
    result = command("train.py", *again).succeeded()
    assert "resuming from step 1" in result.err

    new_tokens = ("--device", "cuda", "--max-new-tokens", "3")
    ways = ((), ("--dtype", "int8", "--cache-dtype", "int8"), ("--no-cache",))
    for way in ways:
        with mock.patch.object(
            Engine, "capture", autospec=True, side_effect=Engine.capture
        ) as capture:
            result = command("generate.py", "Ann had", *new_tokens, *way).succeeded()
        assert "3 tokens" in result.err
        assert capture.call_count == (way != ("--no-cache",))


@pytest.mark.parametrize(
    "variant, is_int8",
    [("gqa", False), ("sliding_window", False), ("mla", True), ("gdn", True), ("dsa", False)],
)
def test_decoding_compiles_to_one_graph_whose_inputs_have_static_addresses(
    gpu, graphs, variant, is_int8
):
    """Otherwise, the CUDA graph would copy weights or cache for every token."""
    model = decoding_model(variant, torch.bfloat16, int8=is_int8)
    cache_dtype = torch.int8 if is_int8 else torch.bfloat16
    engine = Engine(model, SAMPLER, model.new_cache(2, 16, cache_dtype, CUDA))
    engine.compile()
    for _ in engine.generate([Sequence([1, 2, 3], 5), Sequence([4, 5], 5)]):
        pass
    (graph,) = graphs
    inputs = graph.graph.find_nodes(op="placeholder")
    moving = []
    for node in inputs:
        if "_dynamo_static_input_type" not in node.meta["tensor_dict"]:
            moving.append(node.name)
    assert len(inputs) > 20 and not moving


@pytest.mark.parametrize(("gpu", "has_pdl"), [(9, True), (8, False)], indirect=["gpu"])
def test_decode_kernels_overlap_on_hopper_and_later(gpu, monkeypatch, has_pdl):
    compile_step = mock.Mock()
    monkeypatch.setattr(torch, "compile", compile_step)
    model = decoding_model("gqa model.depth=1", torch.bfloat16)
    Engine(model, SAMPLER, model.new_cache(2, 16, torch.bfloat16, CUDA)).compile()
    options = compile_step.call_args.kwargs["options"]
    assert options["triton.cudagraphs"] and options["coordinate_descent_tuning"]
    assert options.get("triton.enable_pdl", False) is has_pdl
