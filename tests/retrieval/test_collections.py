"""Folders of collections: what is read, what is tolerated, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from gossamer.errors import ConfigError, DataError
from gossamer.retrieval import read_beir, read_documents, read_msmarco, read_topics

CORPUS = [
    {"_id": "d1", "title": "Wings", "text": "about wings", "metadata": {"year": 1960}},
    {"_id": 2, "text": " no title "},
    {"_id": "d3", "title": "", "text": ""},
]
QUERIES = [
    {"_id": "q1", "text": "wings?"},
    {"_id": 5, "text": "titles?"},
    {"_id": "x", "text": "-"},
]
QRELS = "query-id\tcorpus-id\tscore\nq1\td1\t2\n5\t2\t0\n"


def jsonl(rows: list[dict[str, object]]) -> str:
    return "\n".join(json.dumps(row) for row in rows)


def beir(
    folder: Path, corpus: str | None = None, queries: str | None = None, qrels: str = QRELS
) -> Path:
    (folder / "qrels").mkdir(parents=True)
    corpus, queries = corpus if corpus is not None else jsonl(CORPUS), queries or jsonl(QUERIES)
    (folder / "corpus.jsonl").write_bytes(corpus.encode())
    (folder / "queries.jsonl").write_bytes(queries.encode())
    (folder / "qrels" / "test.tsv").write_bytes(qrels.encode())
    return folder


# --- BEIR ---


def test_a_beir_folder(tmp_path: Path) -> None:
    corpus, queries, qrels = read_beir(beir(tmp_path / "set"))
    assert corpus == {"d1": "Wings about wings", "2": "no title", "d3": ""}
    assert queries == {"q1": "wings?", "5": "titles?"}
    assert qrels == {"q1": {"d1": 2}, "5": {"2": 0}}


def test_what_is_tolerated(tmp_path: Path) -> None:
    plain = read_beir(beir(tmp_path / "plain"))
    texts = ("\ufeff" + text.replace("\n", "\r\n") + "\r\n\r\n" for text in
             (jsonl(CORPUS), jsonl(QUERIES), QRELS))  # fmt: skip
    odd = beir(tmp_path / "odd", *texts)
    assert read_beir(odd) == plain
    for name in ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv"):
        path = odd / name
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert read_beir(odd) == plain


def test_a_line_separator_of_unicode_is_part_of_a_text(tmp_path: Path) -> None:
    row = json.dumps({"_id": "d1", "text": "a\u2028b\x85c"}, ensure_ascii=False)
    assert read_beir(beir(tmp_path / "set", row, qrels="q1\td1\t1\n")).corpus == {
        "d1": "a\u2028b\x85c"
    }


def test_judged_documents_outside_the_corpus_are_kept_with_a_warning(tmp_path: Path) -> None:
    folder = beir(tmp_path / "set", qrels=QRELS + "q1\tlost\t1\n")
    with pytest.warns(UserWarning, match="1 judged documents .* not in its corpus, such as 'lost'"):
        assert read_beir(folder).qrels["q1"] == {"d1": 2, "lost": 1}


@pytest.mark.parametrize(
    ("corpus", "message"),
    [
        ("", r"corpus\.jsonl must hold one item a line; it is empty"),
        ("\n", "must hold at least one document; got none"),
        ('{"_id": "d1", "text": "x"}\n{"_id" "d2"}', r"jsonl, line 2, column 8: .*not valid JSON"),
        ("[1]", r"line 1, column 1: expected a JSON object with"),
        ('{"text": "x"}', r"line 1, column 1: expected the key '_id'; got text"),
        ('{"_id": "d1"}', r"expected the key 'text'; got _id"),
        ('{"_id": "d1", "text": null}', r"line 1, column 1: text must be text .*; got null"),
        ('{"_id": "d1", "text": 3}', r"text must be text .*; got 3"),
        ('{"_id": true, "text": "x"}', r"_id must be text .*; got True"),
        ('{"_id": "", "text": "x"}', r"_id must be at least one character"),
        ('{"_id": "d1", "title": 4, "text": "x"}', r"title must be text .*; got 4"),
        ('{"_id": 1, "text": "x"}\n{"_id": "1", "text": "y"}', r"line 2, .*got '1' a second time"),
        ('{"_id": "z", "text": "x"}', r"none of 2 is, such as '2', where the corpus has .*'z'"),
        ("[" * 100_000, r"nested too deep|not valid JSON"),
    ],
)
def test_bad_documents_are_refused(tmp_path: Path, corpus: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_beir(beir(tmp_path / "set", corpus))


def test_queries_of_another_set_are_refused(tmp_path: Path) -> None:
    folder = beir(tmp_path / "set", queries='{"_id": "q1", "text": "?"}')
    with pytest.raises(DataError, match=r"1 of 2 are not, such as '5', where .* ids like 'q1'"):
        read_beir(folder)


def test_missing_files_are_named(tmp_path: Path) -> None:
    folder = beir(tmp_path / "set")
    with pytest.raises(DataError, match=r"split 'dev' as dev\.tsv .* it holds test\.tsv"):
        read_beir(folder, split="dev")
    (folder / "corpus.jsonl").unlink()
    with pytest.raises(DataError, match=r"the documents as corpus\.jsonl or corpus\.jsonl\.gz"):
        read_beir(folder)
    with pytest.raises(DataError, match="there is no such folder"):
        read_beir(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "documents", "queries", "pairs"),
    [("cranfield", 1400, 225, 1837), ("vaswani", 11_429, 93, 2083)],
)
def test_real_sets(outside_data: Path, name: str, documents: int, queries: int, pairs: int) -> None:
    data = read_beir(outside_data / name)
    assert (len(data.corpus), len(data.queries)) == (documents, queries)
    assert sum(map(len, data.qrels.values())) == pairs
    if name == "cranfield":
        assert data.corpus["471"] == data.corpus["995"] == ""


# --- MS MARCO ---


def msmarco(folder: Path, collection: str = "7\ta passage\n8\tb\tc\n") -> Path:
    folder.mkdir()
    (folder / "collection.tsv").write_text(collection)
    (folder / "queries.dev.small.tsv").write_text("1\twhat?\n2\twho?\n")
    (folder / "qrels.dev.small.tsv").write_text("1\t0\t7\t1\n")
    return folder


def test_the_files_of_ms_marco(tmp_path: Path) -> None:
    data = read_msmarco(msmarco(tmp_path / "set"))
    assert data.corpus == {"7": "a passage", "8": "b\tc"}
    assert data.queries == {"1": "what?"}
    assert data.qrels == {"1": {"7": 1}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is empty"),
        ("7 a passage\n", r"collection\.tsv, line 1, column 3: expected an id, a tab and a text"),
        ("7\ta\n7\tb\n", r"line 2, column 1: expected each id once; got '7'"),
    ],
)
def test_bad_passages_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_msmarco(msmarco(tmp_path / "set", text))


# --- between tags ---

OPEN = """<top>
<num> Number: 301
<title> International Organized
Crime

<desc> Description:
Identify organizations &amp; more.
<narr> Narrative:
A document
</top>
"""
CLOSED = "<TOP><NUM>2</NUM><title>Topic: other</title><desc>d</desc><narr>n</narr></TOP>"


def test_topics_with_open_and_closed_fields(tmp_path: Path) -> None:
    path = tmp_path / "topics.gz"
    path.write_bytes(gzip.compress((OPEN + CLOSED).encode()))
    assert read_topics(path) == {"301": "International Organized Crime", "2": "other"}
    assert read_topics(path, field="desc")["301"] == "Identify organizations & more."
    assert read_topics(path, field="narr")["301"] == "A document"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "must hold <top> ... </top>; got none"),
        ("\n<top><num>1<title>a", r"line 2, column 1: expected </top> before the end"),
        ("<top>\n <top>", r"line 2, column 2: expected <top> and </top> in turn; got <top> after"),
        ("</top>", "got </top> first"),
        ("<top><title>a</top>", "got none or an empty <num>"),
        ("<top><num>1<title> </top>", "got none or an empty <title>"),
        (CLOSED + CLOSED, "each topic once; got '2' a second time"),
    ],
)
def test_bad_topics_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "topics"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_topics(path)


def test_an_unknown_field_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown field of a topic"):
        read_topics(tmp_path, field="query")  # type: ignore[arg-type]


def test_documents_with_and_without_text_elements(tmp_path: Path) -> None:
    path = tmp_path / "docs"
    path.write_bytes(
        b"<DOC>\n<DOCNO>1</DOCNO>\ncompact  memories\nhave 2 < 3 parts\n</DOC>\n"
        b"<DOC><DOCNO> AP-2 </DOCNO><FILEID>skip</FILEID><HEAD>Caf\xe9</HEAD>\n"
        b"<TEXT>one\n<P>two</P></TEXT>skip<TEXT>three</TEXT></DOC>"
    )
    assert read_documents(path, encoding="latin-1") == {
        "1": "compact memories have 2 < 3 parts",
        "AP-2": "Café one two three",
    }
    with pytest.raises(DataError, match=r"line 6, column 57: expected utf-8 text.*0xe9"):
        read_documents(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<DOC>text</DOC>", "expected a document with <DOCNO>"),
        ("<DOC><DOCNO>1</DOCNO></DOC>\n<doc><docno>1</docno></doc>", "line 2, .*got '1' a second"),
    ],
)
def test_bad_documents_between_tags_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "docs"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_documents(path)
