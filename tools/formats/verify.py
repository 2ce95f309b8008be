"""Read models and tokenizers with `transformers`, and compare them with ours by running both."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from data.tokenizer import SPACE, SentencePieceTokenizer, Tokenizer
from run.errors import IntegrityError

LOCAL = {"trust_remote_code": False, "local_files_only": True}
MAX_TOKENS = 512  # in the row on which logits are compared
TOLERANCE = 1e-3  # of the standard deviation of the logits
# Texts that tokenizers treat differently: spaces, line endings, digits, letters with several forms,
# rare characters, SentencePiece's symbol for a space, and texts that look like special tokens.
TEXTS = (
    "",
    " ",
    "a",
    " a",
    "a ",
    "a b",
    "a  b",
    "   a\n\n   b",
    "a\tb\n",
    "\n",
    "\r\n",
    "x=1;\r\n\r\n  y",
    "if x:\n    return 'y'\n",
    "Once upon a time, there was a little girl.",
    "had a red ball. " * 9,
    "A .",
    "Hello, world! How's it going?",
    "don't DON'T I'LL",
    "a_b-c...",
    "snake_case camelCase HTTPServer2",
    "1",
    "12345 678",
    "3.14, 1,000,000 and 0x1F",
    "$5 + 7% = #9 @home",
    "(a) [b] {c} <d>",
    "http://example.org/?q=1&r=2",
    "\ufb01 \u00bd \u2460",
    "e\u0301 \u00e9",
    "\u0301a",
    "\u00a0a\u3000b\u200bc",
    "\u0442\u0435\u0441\u0442 \u0436\u0443\u043a",
    "\u4f60\u597d\uff0c\u4e16\u754c",
    "\u0627\u0644\u0633\u0644\u0627\u0645",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "\u0436\U0001f408 \U0001f468\u200d\U0001f469\u200d\U0001f467",
    "a \U0010ffff",
    "NUL \0 DEL \x7f",
    "\ufeffa\ufffdb",
    "a\u2028b\x0bc",
    f"a{SPACE}b",
    f"{SPACE}{SPACE}a {SPACE}",
    "<s> a</s>b <unk><0x41><pad>",
    " <|endoftext|>a<|im_start|> b",
)


@contextmanager
def malformed(what: str) -> Iterator[None]:
    """Convert errors from an untrusted file into ValueError, except errors that callers report."""
    try:
        yield
    except (IntegrityError, OSError, KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:  # a panic in tokenizers is not a subclass of Exception
        if isinstance(error, ValueError) and ". fix: " in str(error):
            raise
        lines = str(error).split("\n")
        raise ValueError(f"{what}: {type(error).__name__}: {' '.join(lines[:3])}") from None


def import_transformers() -> ModuleType:
    """Import transformers without its warnings. Raises ValueError if it is not installed."""
    try:
        import transformers
    except ImportError:
        raise ValueError(
            "cannot import transformers. fix: pip install -r requirements-dev.txt"
        ) from None
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    return transformers


def load_theirs(folder: Path) -> nn.Module:
    """Load a folder's model with transformers, in fp32.

    Raises IntegrityError if a tensor cannot be read, is missing, left over or of another shape.
    """
    library = import_transformers()
    what = f"transformers cannot read the weights ({folder}"
    fix = "download the model again, as .safetensors (.bin files are pickles, which could run code)"
    try:
        # The report names all tensors of other shapes, which are refused below.
        model, report = library.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **LOCAL,
        )
    except Exception as error:
        lines = str(error).split("\n")
        raise IntegrityError(f"{what}: {' '.join(lines[:3])}). fix: {fix}") from None
    for kind, names in report.items():
        if names:
            raise IntegrityError(f"{what}: {kind}: {sorted(map(str, names))[:3]}). fix: {fix}")
    return model.eval()


def example_row(tree: dict) -> Tensor:
    """Return a row of up to MAX_TOKENS random tokens (1, T) for a model of ours."""
    draw = torch.Generator().manual_seed(0)
    length = min(MAX_TOKENS, tree["context"])
    return torch.randint(tree["vocab_size"], (1, length), generator=draw)


def logits_differ(ours: Tensor, theirs: Tensor) -> str | None:
    """Describe how logits (1, T, V) differ from transformers' logits; None if within TOLERANCE."""
    difference = (ours - theirs).abs().max().item()
    spread = theirs.std().item()
    if difference <= TOLERANCE * spread:
        return None
    return f"largest difference {difference:.1e}, standard deviation of the logits {spread:.1e}"


def tokenizers_differ(ours: Tokenizer, theirs) -> str | None:
    """Describe the first text that transformers encodes or decodes differently; None if all agree.

    `theirs` is a tokenizer of transformers. In transformers, an empty prompt has no ids unless the
    tokenizer prepends BOS; our encoding of it is BOS.
    """
    texts = [*TEXTS, *(f"a {token} b" for token in theirs.get_added_vocab())]
    for text in texts:
        # Our SentencePiece tokenizers keep this character, which transformers turns into a space.
        if SPACE in text and isinstance(ours, SentencePieceTokenizer):
            continue
        tokens = ours.encode(text)
        document = [ours.bos, *tokens, ours.eos]
        options = {"add_special_tokens": False}
        pairs = [
            (ours.encode_prompt(text), theirs(text)["input_ids"] or [ours.bos]),
            (ours.encode_with_special_tokens(text), theirs(text, **options)["input_ids"]),
            (tokens, theirs(text, split_special_tokens=True, **options)["input_ids"]),
            (
                ours.decode(document),
                theirs.decode(
                    document, skip_special_tokens=True, clean_up_tokenization_spaces=False
                ),
            ),
        ]
        for found, expected in pairs:
            if found != expected:
                return f"{text!a} gives {found!a} in attend and {expected!a} in transformers"
    return None
