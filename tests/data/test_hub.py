"""Public datasets, loaded by the `datasets` library from a local folder instead of the Hub."""

from hashlib import sha256
from pathlib import Path

import pytest
from pyarrow import parquet, table

from data import sources
from data.prepare import prepare
from data.sources import Hub
from tests.faults.harness import documents_of

STORIES = [f"Story {i}: Tom had {i % 7} apples and gave {i % 3} to Sue." for i in range(300)]


@pytest.fixture
def repo(tmp_path, monkeypatch) -> Path:
    """A dataset with two splits."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    folder = tmp_path / "stories"
    (folder / "data").mkdir(parents=True)
    parquet.write_table(table({"text": STORIES}), folder / "data" / "train-00000.parquet")
    parquet.write_table(table({"text": STORIES[:20]}), folder / "data" / "validation-00000.parquet")
    return folder


def hub(repo: Path, **options) -> Hub:
    given = {
        "tokenizer": None,
        "config": None,
        "revision": "main",
        "train": "train",
        "validation": "validation",
        "text_field": "text",
        "starts": None,
        "tokens": None,
        "holdout": 20,
    }
    return Hub(repo=str(repo), vocab_size=400, **given | options)


@pytest.mark.parametrize("tokens", [None, 4000])
def test_a_public_dataset_can_be_downloaded_or_streamed(repo, tmp_path, tokens):
    corpus = prepare(hub(repo, tokens=tokens), tmp_path / "cache")
    (train,) = corpus.train
    assert len(train) >= 4000 and (tokens is None or len(train) < 4100)
    assert corpus.tokenizer.decode(train[:100].tolist()).startswith(STORIES[20])


def test_a_cached_corpus_is_reused_with_its_own_tokenizer(repo, tmp_path, monkeypatch):
    corpus = prepare(hub(repo), tmp_path / "cache")
    path = tmp_path / "run.model"
    path.write_bytes(corpus.tokenizer.files["tokenizer.model"])
    monkeypatch.delattr(Hub, "parts")  # the dataset must not be read again
    again = prepare(hub(repo, tokenizer=str(path)), tmp_path / "cache")
    assert again.sha256 == corpus.sha256


def test_documents_are_held_out_by_hash_without_a_validation_split(repo):
    documents = documents_of(hub(repo))
    # The rows of the validation split are also in the training split, and not trained on.
    assert documents == [(text, number < 20) for number, text in enumerate(STORIES)]
    documents = documents_of(hub(repo, validation=None))
    hashes = [int(sha256(text.encode()).hexdigest(), 16) for text in STORIES]
    assert documents == [(t, h % 20 == 0) for t, h in zip(STORIES, hashes, strict=True)]


def test_rows_are_joined_into_documents(repo):
    texts = [*hub(repo, starts=r"Story \d*0:").texts("train")]
    assert texts == ["".join(STORIES[i : i + 10]) for i in range(0, 300, 10)]


def test_a_row_without_text_is_refused(repo):
    with pytest.raises(ValueError, match=r"data\.text_field"):
        next(hub(repo, text_field="body").texts("train"))


def test_copies_of_held_out_text_beyond_the_limit_are_not_trained_on(repo, monkeypatch):
    texts = {split: [letter * 900 for letter in "abcdef"] for split in ("train", "validation")}
    texts["train"].append("new")
    monkeypatch.setattr(Hub, "texts", lambda self, split: texts[split])
    monkeypatch.setattr(sources, "MAX_VALIDATION_BYTES", 1000)
    # Two documents exceed the limit. The second is not used, but shows that there are more.
    parts = [(part.text[0], part.is_held_out) for part in hub(repo).parts()]
    assert parts == [("a", True), ("b", True), ("n", False)]


def test_a_missing_dataset_is_refused_in_one_line(repo, tmp_path):
    for source in (hub(tmp_path / "absent"), hub(repo, train="absent")):
        with pytest.raises(ValueError, match="absent") as error:
            prepare(source, tmp_path / "cache")
        assert "\n" not in str(error.value)
