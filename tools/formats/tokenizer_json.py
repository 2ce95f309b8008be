"""A byte-pair SentencePiece model as tokenizer.json, as huggingface.co/docs/tokenizers has it."""

import base64

from sentencepiece.sentencepiece_model_pb2 import ModelProto, NormalizerSpec

from data.tokenizer import SPACE


def tokenizer_json(vocabulary: ModelProto, special: dict[str, str]) -> dict:
    """The content of tokenizer.json, which puts BOS in front of a text.

    `special` has the pieces of bos_token, eos_token and unk_token.
    """
    ids = {piece.piece: number for number, piece in enumerate(vocabulary.pieces)}
    # Special pieces match only as a whole, before the text is normalized.
    added = []
    for piece in sorted(special.values(), key=ids.get):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added.append({"id": ids[piece], "content": piece, **flags, "special": True})
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": normalizers(vocabulary.normalizer_spec)},
        "post_processor": post_processor(special["bos_token"], ids),
        "decoder": {"type": "Sequence", "decoders": decoders(vocabulary.normalizer_spec)},
        "model": {
            "type": "BPE",
            "unk_token": special["unk_token"],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": ids,
            "merges": merges(vocabulary, ids),
        },
    }


def merges(vocabulary: ModelProto, ids: dict[str, int]) -> list[list[str]]:
    """All pairs of pieces that make a piece, in the order in which SentencePiece would merge them.

    That is the order of the scores of what they make. Pairs that make the same piece are in the
    order of their ids.
    """
    normal = [piece for piece in vocabulary.pieces if piece.type == piece.NORMAL]
    normal.sort(key=lambda piece: -piece.score)
    known = {piece.piece for piece in normal}
    # Every cut of a piece into two known pieces is a merge.
    pairs = []
    for piece in normal:
        text = piece.piece
        cuts = [[text[:cut], text[cut:]] for cut in range(1, len(text))]
        pairs += sorted(filter(known.issuperset, cuts), key=lambda cut: [ids[part] for part in cut])
    return pairs


def normalizers(spec: NormalizerSpec) -> list[dict]:
    """The steps from a text to what is encoded, as SentencePiece does them."""
    steps = []
    if spec.precompiled_charsmap:
        charsmap = base64.b64encode(spec.precompiled_charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if spec.remove_extra_whitespaces:
        for spaces, content in ((r"\A +| +\z", ""), (" {2,}", " ")):
            steps.append({"type": "Replace", "pattern": {"Regex": spaces}, "content": content})
    if spec.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": " "})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    return steps


def decoders(spec: NormalizerSpec) -> list[dict]:
    """The steps from pieces back to a text."""
    steps = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if spec.add_dummy_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return steps


def post_processor(bos: str, ids: dict[str, int]) -> dict:
    """The template BOS + text, and BOS + text + text for a pair of texts."""
    single = [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [ids[bos]], "tokens": [bos]}},
    }
