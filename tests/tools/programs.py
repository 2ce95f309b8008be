"""Check exports in other programs for the table in docs/formats.md. Run manually, not in CI.

    python -m tests.tools.programs make FOLDER                    trains tiny models and exports them
    PYTHON tests/tools/programs.py PROGRAM FOLDER [PRESET...]     compares with results of `make`

PYTHON is the interpreter of a virtual environment that has the program installed:

    transformers, onnxruntime    pip install torch transformers sentencepiece protobuf onnx onnxscript onnxruntime
    peft, trl                    pip install torch transformers sentencepiece protobuf peft trl
    llama.cpp                    pip install torch transformers sentencepiece gguf llama-cpp-python, whose source has
                                 convert_hf_to_gguf.py; set CONVERTER to the path of this file
    mlx-lm                       pip install mlx[cpu] mlx-lm sentencepiece protobuf
    ctranslate2                  pip install torch transformers sentencepiece protobuf ctranslate2

A cell is the largest difference between logits, or the number of texts with equal ids, with equal
greedy continuations, or with equal ends.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np

NO_NORMS = "attention.kinds.rope.qk_norm=null attention.kinds.nope.qk_norm=null"
LOCAL_NO_NORMS = "attention.kinds.local.qk_norm=null attention.kinds.full.qk_norm=null"
PRESETS = {
    "llama": "attention=llama",
    "llama, tied": "attention=llama model.tied=true",
    "llama, geglu": "attention=llama ffn=geglu",
    "gqa": "attention=gqa",
    "gqa, geglu": "attention=gqa ffn=geglu",
    "sliding_window": "attention=sliding_window attention.window=16",
    "sliding_window, no norm": "attention=sliding_window attention.window=16 attention.qk_norm=null",
    "nope": f"attention=nope {NO_NORMS}",
    "window_nope": f"attention=window_nope attention.kinds.local.window=16 {LOCAL_NO_NORMS}",
    "gpt_oss": "attention=gpt_oss attention.kinds.local.window=16",
    "llama4": "attention=llama4 attention.kinds.local.chunk=16",
    "mla": "attention=mla",
    "differential": "attention=differential attention.qk_norm=null",
    "gated": "attention=gated",
    "gdn": "attention=gdn",
    "kda": "attention=kda",
}
PROMPTS = (
    "Ann had", " Bob", "Cleo had a small dog. ", "Dan", "\n", "Eve had the", "an old map", "Fay saw", "Ann had  a", "Bob,",
)  # fmt: skip
TEXTS = (
    *PROMPTS, "", " ", "\ttab\t\t", "\n\nlines\r\n", "emoji 😀", "Привет, мир", "</s>", "a<s> </s>b", "<unk><0x41>",
    "trailing  ", "0123 45", "e\u0301 \u00a0ﬁ½", "<p>one</p>",
)  # fmt: skip
MOST = 60  # tokens per continuation


def make(root: Path) -> None:
    """Train and export each preset, and save our logits, ids and greedy continuations."""
    import torch

    from data.tokenizer import Tokenizer, tokenizer_file
    from run import checkpoint
    from tests.conftest import ROOT, TINY, continued, tell

    root.mkdir(parents=True)
    text = ("data=text", f"data.path={tell(root)}", "data.vocab_size=400", "steps=120")
    for name, words in PRESETS.items():
        folder = root / name
        run = root / "runs" / name
        for command in (
            [ROOT / "train.py", *TINY, *text, *words.split(), "model.depth=4", f"run_dir='{run}'"],
            ["-m", "tools.export_hf", "--run", run, "--out", folder],
        ):
            subprocess.run([sys.executable, *command], check=True, cwd=ROOT)
        path = checkpoint.find_model(run)
        model = checkpoint.load_model(path, "cpu")
        tokenizer = Tokenizer.load(tokenizer_file(path))
        prompts = [tokenizer.encode_prompt(prompt) for prompt in PROMPTS]
        made = []
        for prompt in prompts:
            (tokens,) = continued(model, [prompt], MOST, rows=1, eos=tokenizer.eos_ids)
            made.append(tokens)
        tokens = torch.arange(3, 53)[None]
        with torch.no_grad():
            np.save(folder / "ours.npy", model(tokens)[0].numpy())
        notes = {
            "ids": [tokenizer.encode_prompt(text) for text in TEXTS],
            "greedy": made,
            "eos": tokenizer.eos,
        }
        (folder / "ours.json").write_text(json.dumps(notes), encoding="utf-8")


class Transformers:
    """The reference program; subclasses override the differences."""

    def __init__(self, folder: Path):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Return the logits (T, V) of tokens (T,)."""
        with self.torch.no_grad():
            return self.model(self.torch.tensor([tokens])).logits[0].numpy()

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text)["input_ids"]

    def greedy(self, tokens: list[int]) -> list[int]:
        """The greedy continuation of these tokens, including EOS."""
        made = self.model.generate(
            self.torch.tensor([tokens]), max_new_tokens=MOST, do_sample=False
        )
        return made[0, len(tokens) :].tolist()


class Peft(Transformers):
    """Merges a zero-initialized adapter into the weights."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(target_modules="all-linear", r=4, task_type="CAUSAL_LM")
        self.model = get_peft_model(self.model, config).merge_and_unload().eval()


class Trl(Transformers):
    """Fine-tunes for 200 steps on one text, which the model must then reproduce up to EOS."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        self.text = "Ann had a red ball."
        args = SFTConfig(
            output_dir=folder / "trl",
            max_steps=200,
            learning_rate=1e-3,
            per_device_train_batch_size=8,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
        )
        rows = Dataset.from_dict({"text": [self.text] * 8})
        trainer = SFTTrainer(self.model, args, train_dataset=rows, processing_class=self.tokenizer)
        trainer.train()
        self.model.eval()

    def stops(self) -> bool:
        prompt = self.ids("Ann had")
        made = self.greedy(prompt)
        told = self.tokenizer.decode([*prompt, *made], skip_special_tokens=True)
        return told == self.text and made[-1] == self.tokenizer.eos_token_id


class Onnx(Transformers):
    """The transformers class, exported by torch.onnx.export without a cache."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        import onnxruntime

        torch, model = self.torch, self.model
        model.config.use_cache = False

        class Logits(torch.nn.Module):
            def forward(self, tokens):
                return model(tokens, use_cache=False).logits

        length = torch.export.Dim("length", min=2, max=64)
        example = torch.ones(1, 7, dtype=torch.long)
        file = str(folder / "model.onnx")
        torch.onnx.export(
            Logits(), (example,), file, dynamo=True, dynamic_shapes={"tokens": {1: length}},
            input_names=["tokens"],
        )  # fmt: skip
        self.session = onnxruntime.InferenceSession(file)

    def logits(self, tokens: list[int]) -> np.ndarray:
        return self.session.run(None, {"tokens": np.array([tokens], dtype=np.int64)})[0][0]

    def greedy(self, tokens: list[int]) -> list[int]:
        made = []
        while len(made) < MOST and (not made or made[-1] != self.tokenizer.eos_token_id):
            padded = [*tokens, *made, 0]  # at least two tokens
            made.append(int(self.logits(padded)[len(padded) - 2].argmax()))
        return made


class CTranslate2(Transformers):
    def __init__(self, folder: Path):
        import ctranslate2
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        out = str(folder / "ctranslate2")
        ctranslate2.converters.TransformersConverter(str(folder)).convert(out, force=True)
        self.generator = ctranslate2.Generator(out)

    def words(self, tokens: list[int]) -> list[str]:
        return self.tokenizer.convert_ids_to_tokens(tokens)

    def logits(self, tokens: list[int]) -> np.ndarray:
        return np.array(self.generator.forward_batch([self.words(tokens)]))[0]

    def greedy(self, tokens: list[int]) -> list[int]:
        (result,) = self.generator.generate_batch(
            [self.words(tokens)],
            max_length=MOST,
            include_prompt_in_result=False,
            end_token=self.tokenizer.eos_token,
            return_end_token=True,
        )
        return result.sequences_ids[0]


class Mlx:
    def __init__(self, folder: Path):
        import mlx.core as mx
        from mlx_lm import load

        self.mx = mx
        mx.set_default_device(mx.cpu)
        self.model, self.tokenizer = load(str(folder))

    def logits(self, tokens: list[int]) -> np.ndarray:
        return np.array(self.model(self.mx.array([tokens])).astype(self.mx.float32))[0]

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def greedy(self, tokens: list[int]) -> list[int]:
        from mlx_lm import stream_generate

        stream = stream_generate(self.model, self.tokenizer, tokens, max_tokens=MOST)
        return [part.token for part in stream]


class LlamaCpp:
    """llama.cpp with default options."""

    overrides = None

    def __init__(self, folder: Path):
        from llama_cpp import Llama

        file = folder / "model.gguf"
        words = [sys.executable, os.environ["CONVERTER"], folder, "--outfile", file]
        done = subprocess.run([*words, "--outtype", "f32"], capture_output=True, encoding="utf-8")
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        # Type 0: keys and values are cached in fp32.
        self.model = Llama(
            str(file),
            n_ctx=128,
            logits_all=True,
            type_k=0,
            type_v=0,
            verbose=False,
            kv_overrides=self.overrides,
        )

    def logits(self, tokens: list[int]) -> np.ndarray:
        self.model.reset()
        self.model.eval(tokens)
        return np.array(self.model.scores[: len(tokens)])

    def ids(self, text: str) -> list[int]:
        return self.model.tokenize(text.encode(), add_bos=True, special=True)

    def greedy(self, tokens: list[int]) -> list[int]:
        made = []
        for token in self.model.generate(tokens, temp=0.0, repeat_penalty=1.0):
            made.append(token)
            if len(made) == MOST or token == self.model.token_eos():
                return made


class LlamaCppWithoutSpace(LlamaCpp):
    """--override-kv tokenizer.ggml.add_space_prefix=bool:false"""

    overrides = {"tokenizer.ggml.add_space_prefix": False}


PROGRAMS = {
    "transformers": (Transformers, "transformers"),
    "peft": (Peft, "peft"),
    "trl": (Trl, "trl"),
    "onnxruntime": (Onnx, "onnxruntime"),
    "ctranslate2": (CTranslate2, "ctranslate2"),
    "mlx-lm": (Mlx, "mlx-lm"),
    "llama.cpp": (LlamaCpp, "llama-cpp-python"),
    "llama.cpp-override": (LlamaCppWithoutSpace, "llama-cpp-python"),
}


def compare(program, folder: Path) -> list[str]:
    """The cells of a preset: logits, ids, greedy, stop."""
    ours = json.loads((folder / "ours.json").read_text(encoding="utf-8"))
    difference = np.abs(program.logits([*range(3, 53)]) - np.load(folder / "ours.npy")).max()
    same_ids = [program.ids(text) == ids for text, ids in zip(TEXTS, ours["ids"], strict=True)]
    same = []
    stopped = []
    for text, tokens in zip(PROMPTS, ours["greedy"], strict=True):
        made = program.greedy([*program.ids(text)])
        same.append(made == tokens)
        if tokens[-1] == ours["eos"]:
            stopped.append(len(made) == len(tokens) and made[-1] == ours["eos"])
    return [
        f"{difference:.0e}",
        *(f"{sum(found)}/{len(found)}" for found in (same_ids, same, stopped)),
    ]


def main(name: str, root: Path, presets: list[str]) -> None:
    kind, package = PROGRAMS[name]
    print(
        f"| {name} ({package} {version(package)}) | logits | ids | greedy | stop |\n|---|---|---|---|---|"
    )
    for preset in presets:
        try:
            program = kind(root / preset)
            if name == "trl":
                cells = ["", "", "", "yes" if program.stops() else "no"]
            else:
                cells = compare(program, root / preset)
        except Exception as error:  # the program lacks the class or one of its features
            (line, *_) = [*str(error).splitlines(), ""]
            cells = [f"{type(error).__name__}: {line[:100]}", "", "", ""]
        print(f"| {preset} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    command, root = sys.argv[1], Path(sys.argv[2]).absolute()
    if command == "make":
        make(root)
    else:
        main(command, root, sys.argv[3:] or [*PRESETS])
