"""A SentencePiece model as tokenizer.json."""

import base64

from sentencepiece.sentencepiece_model_pb2 import ModelProto

from data.tokenizer import SPACE


def tokenizer_json(vocabulary: ModelProto, special: dict[str, str]) -> dict:
    """A byte-pair SentencePiece model as tokenizer.json, the format of huggingface.co/docs/tokenizers.

    What merges into the same piece is in the order of its ids.
    """
    how, ids = (
        vocabulary.normalizer_spec,
        {piece.piece: number for number, piece in enumerate(vocabulary.pieces)},
    )
    merged = {piece.piece for piece in vocabulary.pieces if piece.type == piece.NORMAL}
    merges = []
    for piece in sorted(
        merged, key=lambda piece: (-vocabulary.pieces[ids[piece]].score, ids[piece])
    ):
        cuts = [(piece[:n], piece[n:]) for n in range(1, len(piece))]
        cuts = [cut for cut in cuts if merged.issuperset(cut)]
        merges += sorted(cuts, key=lambda cut: (ids[cut[0]], ids[cut[1]]))
    steps = []
    if how.precompiled_charsmap:
        charsmap = base64.b64encode(how.precompiled_charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if how.remove_extra_whitespaces:
        for spaces, content in ((r"\A +| +\z", ""), (" {2,}", " ")):
            steps.append({"type": "Replace", "pattern": {"Regex": spaces}, "content": content})
    if how.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": " "})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    back = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
    ]
    back += [{"type": "Fuse"}]
    back += (
        [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if how.add_dummy_prefix else []
    )
    bos, text = (
        {"SpecialToken": {"id": special["bos_token"], "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    )
    other = [{"Sequence": {"id": "B", "type_id": 1}}]
    known = {
        "id": special["bos_token"],
        "ids": [ids[special["bos_token"]]],
        "tokens": [special["bos_token"]],
    }
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {
        "special": True
    }
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": ids[sign], "content": sign, **flags}
            for sign in sorted(special.values(), key=ids.get)
        ],
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, text],
            "pair": [bos, text, *other],
            "special_tokens": {special["bos_token"]: known},
        },
        "decoder": {"type": "Sequence", "decoders": back},
        "model": {
            "type": "BPE",
            "unk_token": special["unk_token"],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": ids,
            "merges": [list(cut) for cut in merges],
        },
    }
