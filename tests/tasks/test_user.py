"""A task from a user's own file: sequences, batches, parts, couplings, and what can be wrong."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from gossamer.errors import ConfigError, DataError, UnsupportedError
from gossamer.tasks import AdditionTask, FileTask, FunctionCoupling, build_task, collate
from gossamer.tasks.coupling import GroupCoupling
from gossamer.tasks.preview import preview_task
from gossamer.tasks.rows import Row, held_out


def write(path: Path, rows: Sequence[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sums(size: int, lo: int, hi: int, seed: int = 0) -> list[dict]:
    draw = random.Random(seed)
    rows = {}
    while len(rows) < size:
        a, b = (draw.randrange(10 ** draw.randint(lo, hi)) for _ in range(2))
        rows[f"{a}+{b}"] = f"{a + b}"
    return [{"query": query, "answer": answer} for query, answer in rows.items()]


def texts(task: FileTask, batch: object) -> list[str]:
    return [task.symbols(row) for row in batch.tokens]


@pytest.fixture
def task(tmp_path: Path) -> FileTask:
    path = write(tmp_path / "my.jsonl", sums(600, 1, 4))
    return FileTask(path, test=write(tmp_path / "longer.jsonl", sums(90, 8, 9)))


# --- reference values ---


def test_a_sequence_is_that_of_the_addition_task(task: FileTask) -> None:
    for row in task.rows()[:20]:
        ours, theirs = task.example(row.query), AdditionTask().example(row.query)
        spelled = task.symbols(ours.tokens).replace(">", "=")
        assert spelled == AdditionTask().symbols(theirs.tokens)
        assert ours.loss_mask.tolist() == theirs.loss_mask.tolist()
        plus = spelled.index("+")
        assert torch.equal(
            torch.cat((ours.position_ids[:plus], ours.position_ids[plus + 1 :])),
            torch.cat((theirs.position_ids[:plus], theirs.position_ids[plus + 1 :])),
        )
        assert task.decode(ours.tokens[ours.loss_mask]) == row.answer
        assert task.answer(row.query) == row.answer


def test_a_query_ends_where_the_answer_begins(task: FileTask) -> None:
    tokens, ids = task.prompt("123456+7")
    assert task.symbols(tokens) == "$123456+000007>"
    assert torch.equal(tokens, task.encode("123456+7"))
    assert torch.equal(ids, task.position_ids("123456+7"))
    assert len(ids) == len(tokens) + 7 + 1  # seven digits of the answer, and the end
    shifted = task.position_ids("123456+7", start=5)
    assert torch.equal(shifted, torch.where(ids > 0, ids + 4, 0))


def test_batches_are_collated_examples(task: FileTask) -> None:
    batch = task.sample(80, generator=torch.Generator().manual_seed(1), split="test")
    known = {task.symbols(task.example(row.query).tokens): row.query for row in task.rows()}
    apart = collate([task.example(known[text]) for text in texts(task, batch)])
    assert torch.equal(batch.tokens, apart.tokens)
    assert torch.equal(batch.position_ids, apart.position_ids)
    assert torch.equal(batch.loss_mask, apart.loss_mask)
    assert len({int((row != 0).sum()) for row in batch.tokens}) > 1


def test_marks_are_characters_that_the_file_does_not_have(tmp_path: Path) -> None:
    rows = [{"query": f"_$ {n}", "answer": f">{n}"} for n in range(9)]
    task = FileTask(write(tmp_path / "f.jsonl", rows))
    assert task.vocab[:3] == ("#", "^", "~")
    assert task.symbols(task.example("_$ 3").tokens) == "^_$ 3~>3^"
    everything = "".join(chr(n) for n in range(32, 127))
    task = FileTask(write(tmp_path / "g.jsonl", [*rows, {"query": everything, "answer": "a"}]))
    assert task.vocab[:3] == ("<pad>", "<end>", "<answer>")
    assert len(set(task.vocab)) == task.vocab_size


# --- parts and batches ---


def test_parts_do_not_mix(task: FileTask) -> None:
    kept = held_out(task.rows(), task.path)
    queries = [row.query for row in task.rows()]
    spelled = [task.symbols(task.example(query).tokens) for query in queries]
    train = {text for text, held in zip(spelled, kept, strict=True) if not held}
    rest = set(spelled) - train
    seen = {text for n in range(60) for text in texts(task, task.stream(32, seed=0).batch(n))}
    assert seen <= train
    assert len(seen) > 0.9 * len(train)
    assert (
        set(texts(task, task.sample(len(rest), generator=torch.Generator(), split="test"))) == rest
    )
    assert (task.count("train"), task.count("held out")) == (len(train), len(rest))
    assert task.count("test") == 90


def test_the_grid_covers_every_row_that_is_not_trained_on(task: FileTask) -> None:
    cells = task.grid()
    known = {task.symbols(task.encode(r.query))[1:-1]: len(r.query) for r in every(task)}
    assert [cell.coordinates["part"] for cell in cells].count("held out") == 4
    for part in ("held out", "test"):
        own = [cell for cell in cells if cell.coordinates["part"] == part]
        assert sum(cell.coordinates["rows"] for cell in own) == task.count(part)
        low = 0
        for cell in own:
            count = cell.coordinates["rows"]
            batch = cell.task.sample(count, generator=torch.Generator(), split="test")
            queries = [text[1:].partition(">")[0] for text in texts(task, batch)]
            assert len(set(queries)) == count
            assert all(low < known[query] <= cell.coordinates["length"] for query in queries)
            low = cell.coordinates["length"]
    longest = [cell.coordinates["length"] for cell in task.grid(length=[5, 9])]
    assert longest == [5, 9]


def every(task: FileTask) -> list[Row]:
    return [*task.rows(), *(Row(r["query"], r["answer"], None, 0) for r in sums(90, 8, 9))]


def test_a_test_takes_every_row_equally_often(task: FileTask) -> None:
    cell = task.grid()[0]
    count = cell.coordinates["rows"]
    batch = cell.task.sample(3 * count, generator=torch.Generator().manual_seed(0), split="test")
    spelled = texts(task, batch)
    assert all(spelled.count(text) == 3 for text in set(spelled))
    assert len(set(spelled)) == count


def test_batches_are_a_function_of_seed_and_number(task: FileTask) -> None:
    again = FileTask(task.path, test=task.test)
    for number in (0, 7):
        one, two = (t.stream(16, seed=3).batch(number) for t in (task, again))
        assert torch.equal(one.tokens, two.tokens)
        assert torch.equal(one.position_ids, two.position_ids)
    other = task.stream(16, seed=4).batch(0)
    assert not torch.equal(other.tokens, task.stream(16, seed=3).batch(0).tokens)


def test_batches_share_their_form_where_there_are_enough(tmp_path: Path) -> None:
    """Rows of a frequent form come together, rare forms are mixed; every row is equally likely."""
    rows = [{"query": f"{n:04d}", "answer": f"{n:04d}"[::-1]} for n in range(200)]
    rows += [{"query": "x" * n, "answer": "x" * n} for n in range(5, 25)]
    task = FileTask(write(tmp_path / "f.jsonl", rows))
    stream = task.stream(32, seed=0)
    rare = common = 0
    for number in range(400):
        batch = stream.batch(number)
        is_rare = int(batch.tokens[0].eq(task.encode("x")[1]).any())
        rare, common = rare + is_rare, common + 1 - is_rare
        if not is_rare:
            assert bool((batch.position_ids == batch.position_ids[:1]).all())
            assert batch.tokens.shape == (32, 11)
    share = task.count("train") - sum(not h for h in held_out(task.rows(), "")[:200])
    expected = share / task.count("train")
    assert abs(rare / 400 - expected) < 4 * (expected / 400) ** 0.5


# --- what a run folder keeps ---


@pytest.mark.parametrize("coupling", ["auto", "none"])
def test_config_makes_the_task_again_without_the_file(
    tmp_path: Path, coupling: str, task: FileTask
) -> None:
    task = FileTask(task.path, coupling=coupling)
    config = json.loads(json.dumps(task.config))
    options = {key: value for key, value in config.items() if key != "name"}
    Path(task.path).rename(tmp_path / "away.jsonl")
    again = build_task(config["name"], **options)
    assert again.config == task.config
    assert again.vocab == task.vocab
    assert torch.equal(again.encode("12+345"), task.encode("12+345"))
    assert torch.equal(again.position_ids("12+345"), task.position_ids("12+345"))
    assert again.check("1+1", "2") is None
    with pytest.raises(UnsupportedError, match=r"known only where .*my\.jsonl has it; got '1.1'"):
        again.answer("1+1")
    with pytest.raises(DataError, match=r"my\.jsonl does not exist"):
        again.stream(4, seed=0).batch(0)


def test_known_answers_are_checked(task: FileTask) -> None:
    row = task.rows()[0]
    assert task.check(row.query, row.answer) is True
    assert task.check(row.query, f" {row.answer}\n") is True
    assert task.check(row.query, "x") is False
    longer = sums(90, 8, 9)[0]
    assert task.check(longer["query"], longer["answer"]) is True
    assert task.check("7+999999", "1000006") is None


def test_a_file_that_has_changed(task: FileTask) -> None:
    options = {key: value for key, value in task.config.items() if key != "name"}
    write(Path(task.path), sums(600, 1, 4)[:-1])
    again = build_task("file", **options)
    with pytest.raises(DataError, match=r"my\.jsonl must hold the rows .*it has changed"):
        again.stream(4, seed=0).batch(0)
    assert again.check(sums(1, 1, 4)[0]["query"], sums(1, 1, 4)[0]["answer"]) is True


def test_a_spec_names_the_file(task: FileTask) -> None:
    for spec in (task.path, f"file:{task.path}"):
        assert build_task(spec).config["path"] == task.path
    assert build_task(f"{task.path},coupling=none,test={task.test}").count("test") == 90
    with pytest.raises(ConfigError, match=r"unknown task 'my\.json'.*FILE\.jsonl"):
        build_task("my.json")
    with pytest.raises(ConfigError, match="needs the option 'path'"):
        build_task("file")


# --- other couplings ---


def test_plain_ids_where_nothing_is_proposed(tmp_path: Path) -> None:
    draw = random.Random(0)
    rows = [{"query": q["query"], "answer": draw.choice("yn")} for q in sums(300, 1, 3)]
    task = FileTask(write(tmp_path / "f.jsonl", rows))
    assert task.config["coupling"] == "none"
    example = task.example(rows[0]["query"])
    size = len(example.tokens) - 2
    assert example.position_ids.tolist() == [0, *range(1, size + 1), 0]
    assert "counted 1..T" in preview_task(task)
    with pytest.raises(DataError, match="'fields' needs a rule that holds in all rows; got none"):
        FileTask(task.path, coupling="fields")


def grouped(size: int) -> list[dict]:
    """Reversed letters; each names its source in a group of two."""
    draw = random.Random(0)
    rows = {}
    while len(rows) < size:
        query = "".join(draw.choices("abc", k=draw.randint(1, 6)))
        n = len(query)
        groups = [list(range(n)), list(range(2 * n - 1, n - 1, -1))]
        rows[query] = {"query": query, "answer": query[::-1], "groups": groups}
    return list(rows.values())


def test_groups_give_the_ids_of_the_rows(tmp_path: Path) -> None:
    task = FileTask(write(tmp_path / "f.jsonl", grouped(100)))
    assert task.config["coupling"] == "groups"
    query = next(row.query for row in task.rows() if len(row.query) == 4)
    assert task.position_ids(query).tolist() == [0, 2, 3, 4, 5, 6, 5, 4, 3, 2, 0]
    with pytest.raises(DataError, match=r"new query 'abcabcabc'\. To answer new queries a rule"):
        task.encode("abcabcabc")
    assert FileTask(task.path, coupling="fields").encode("abcabcabc").tolist()[0] == 1
    options = {key: value for key, value in task.config.items() if key != "name"}
    Path(task.path).unlink()
    with pytest.raises(DataError, match="--coupling module:function"):
        build_task("file", **options).encode(query)


def test_groups_may_leave_characters_out() -> None:
    coupling = GroupCoupling([Row("ab=", "ba", ((0,), (4,)), 1), Row("c", "d", (), 2)])
    assert coupling.place("ab=").query_ids == [(2,), (0,), (0,), (0,)]
    assert coupling.place("ab=").answer_ids == [(0,), (2,)]
    assert coupling.place("c").query_ids == [(0,), (0,)]


def test_rows_without_groups(tmp_path: Path) -> None:
    rows = grouped(20)
    del rows[4]["groups"]
    path = write(tmp_path / "f.jsonl", rows)
    for coupling in ("auto", "groups"):
        with pytest.raises(DataError, match=r"every row must have the key 'groups'; .* line 5"):
            FileTask(path, coupling=coupling)
    assert FileTask(path, coupling="none").levels == 1


def test_a_rule_of_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: FileTask
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_rules.py").write_text(
        "def count(query):\n"
        "    n = len(query)\n"
        "    return [(i, 1) for i in range(n + 1)], [(i, 2) for i in range(1, 12)]\n"
    )
    own = FileTask(task.path, coupling="my_rules:count")
    assert own.levels == 2
    assert own.position_ids("1+2").tolist()[:5] == [[0, 0], [0, 1], [1, 1], [2, 1], [3, 1]]
    assert own.config["coupling"] == "my_rules:count"
    assert own.sample(4, generator=torch.Generator()).position_ids.shape[-1] == 2
    options = {key: value for key, value in own.config.items() if key != "name"}
    assert torch.equal(build_task("file", **options).position_ids("1+2"), own.position_ids("1+2"))
    same = FileTask(task.path, coupling=sys.modules["my_rules"].count)
    assert same.config == own.config
    assert "the function my_rules:count" in preview_task(own)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "must return two lists, .*; got None for the query 'ab'"),
        (([1, 2, 3],), "must return two lists"),
        (
            ([1, 2], [3]),
            "3 ids for the query, one for each character and one for the mark .*; got 2",
        ),
        (([1, 2, 3], []), "at least one id for the answer; got none"),
        (("123", [1]), "must return a list of ids for the query; got 123"),
        (([1, 2, -3], [1]), "integers >= 0 as ids; got -3 as id 3 of the query"),
        (([1, 2, True], [1]), "got True as id 3"),
        (([1, 2, 3], [1.5]), "got 1.5 as id 1 of the answer"),
        (([1, (1, 1), 3], [1]), r"1 level\(s\) in every id; got \(1, 1\) as id 2 of the query"),
        (([1, 2, 3], [(1, 2)]), r"1 level\(s\) in every id; got \(1, 2\) as id 1 of the answer"),
    ],
)
def test_rules_that_return_something_else(returned: object, message: str) -> None:
    def rule(query: str) -> object:
        return ([1] * (len(query) + 1), [1]) if query == "good" else returned

    with pytest.raises(DataError, match=message):
        FunctionCoupling(rule, "good").place("ab")


def test_rules_may_return_arrays_and_fail() -> None:
    def rule(query: str) -> object:
        return torch.arange(len(query) + 1), range(3)

    assert FunctionCoupling(rule, "ab").place("ab").query_ids == [(0,), (1,), (2,)]

    def broken(query: str) -> object:
        return {}[query]

    with pytest.raises(DataError, match=r"for 'ab' it raised KeyError: 'ab'\. Mend the function"):
        FunctionCoupling(broken, "ab")


@pytest.mark.parametrize(
    ("coupling", "message"),
    [
        ("automatic", "unknown coupling 'automatic'; did you mean 'auto'"),
        (3, "coupling must be a name, module:function or a table; got 3"),
        ("no_such_module:rule", "needs the module 'no_such_module', in the current folder"),
        ("json:rule", "needs a function 'rule' in 'json'; got NoneType"),
        ({"split": "words"}, r"\[task.coupling\] needs the option 'order'"),
    ],
)
def test_couplings_that_do_not_exist(task: FileTask, coupling: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FileTask(task.path, coupling=coupling)


# --- bad input ---


def test_characters_that_the_file_does_not_have(task: FileTask) -> None:
    with pytest.raises(DataError, match=r"characters of .*my\.jsonl only; got '-' at column 2"):
        task.encode("1-2")
    task = FileTask(task.path, coupling="none")
    with pytest.raises(DataError, match=r"got '=' at column 4 of '1.2='"):
        task.position_ids("1+2=")


def test_rows_of_the_test_file_that_do_not_fit(tmp_path: Path, task: FileTask) -> None:
    for row, message in (
        ({"query": "1+x", "answer": "3"}, r"test\.jsonl, line 1: query must hold characters"),
        ({"query": "1+2+3", "answer": "6"}, r"test\.jsonl, line 1: query must have the form"),
        ({"query": "1+200000", "answer": "20000100"}, "must have 7 characters"),
        ({"query": task.rows()[0].query, "answer": "0123"}, "a query must have one answer"),
    ):
        with pytest.raises(DataError, match=message):
            FileTask(task.path, test=write(tmp_path / "test.jsonl", [row]))
    with pytest.raises(DataError, match=r"none\.jsonl does not exist"):
        FileTask(task.path, test="none.jsonl")


def test_answers_without_ids(tmp_path: Path, task: FileTask) -> None:
    def rule(query: str) -> object:
        return range(len(query) + 1), [1, 2]

    with pytest.raises(DataError, match=r"line \d+: answer must have at most 2 characters"):
        FileTask(task.path, coupling=rule)


def test_test_rows_that_are_trained_on_are_left_out(tmp_path: Path, task: FileTask) -> None:
    rows = [{"query": r.query, "answer": r.answer} for r in task.rows()[:5]] + sums(7, 8, 9)
    again = FileTask(task.path, test=write(tmp_path / "test.jsonl", rows))
    assert (again.count("test"), again.repeated) == (7, 5)
    assert "5 rows are left out, since" in preview_task(again)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (3, "must be a table"),
        ({"alphabets": "ab"}, "did you mean 'alphabet'"),
        ({"alphabet": "ab"}, "needs the option 'longest_answer'"),
        ({"longest_answer": "4"}, "longest_answer in .* must be int; got '4'"),
    ],
)
def test_facts_that_are_none(task: FileTask, facts: object, message: str) -> None:
    whole = {**task.config["facts"], **facts} if message.startswith("longest") else facts
    with pytest.raises(ConfigError, match=message):
        FileTask(task.path, facts=whole)


# --- what the user sees ---


def test_the_preview_shows_tokens_above_ids(task: FileTask) -> None:
    text = preview_task(task)
    lines = text.splitlines()
    counts = f"{task.count('train')} rows to train on, {task.count('held out')} held out"
    assert lines[0].endswith(counts)
    assert "these are few" in text
    assert "coupling: field 1 of the answer is aligned at the units with the numbers 1, 2" in text
    row = task.rows()[2]
    begin = lines.index(f"{row.query!r} -> {row.answer!r}")
    tokens, ids = lines[begin + 1], lines[begin + 2]
    example = task.example(row.query)
    assert ids.split()[1:] == [str(int(i)) for i in example.position_ids]
    assert [c for c in tokens[10:] if c != " "] == list(task.symbols(example.tokens))
    assert all(len(line) <= 100 for line in lines if str(Path(task.path).parent) not in line)
    assert lines[-1].startswith("another coupling: --coupling fields, groups")


def test_the_preview_cuts_long_rows_and_names_levels(tmp_path: Path) -> None:
    rows = [{"query": f"{'a' * n}\t{'b' * n}", "answer": f"{'b' * n}\t{'a' * n}"} for n in (40, 3)]
    lines = preview_task(FileTask(write(tmp_path / "f.jsonl", rows))).splitlines()
    assert all(len(line) <= 100 for line in lines if line.startswith("  "))
    assert sum(line.endswith(" ...") for line in lines) == 3
    assert any(line.startswith("  ids 2") for line in lines)
    assert "\\t" in next(
        line for line in lines if line.startswith("  tokens") and "..." not in line
    )
