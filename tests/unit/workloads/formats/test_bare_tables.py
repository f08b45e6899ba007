"""What stands in a table beside loads is understood or refused, never planned as an expert."""

import bz2
import gzip
import lzma

import numpy as np
import pytest
from load_files import LOADS, no_torch

from moeless.errors import TraceError
from moeless.workloads.formats.expert_loads import Declared
from moeless.workloads.formats.read import read_loads

_RNG = np.random.default_rng(7)
EIGHT = _RNG.multinomial(4000, _RNG.dirichlet(np.ones(8), size=6))
"""Loads of six layers, each of 4000 assignments."""


def read(path, text=None, **options):
    if text is not None:
        path = path / "loads.csv"
        path.write_text(text, "utf8")
    return read_loads(path, load_torch=no_torch, **options)


def refused(path, match, text=None, **options):
    with pytest.raises(TraceError, match=match) as caught:
        read(path, text, **options)
    assert "\n" not in str(caught.value)


def lines(table, separator=","):
    return "\n".join(separator.join(str(cell) for cell in row) for row in table) + "\n"


def with_column(column, first=True):
    return np.insert(EIGHT, 0 if first else EIGHT.shape[1], column, axis=1)


@pytest.mark.parametrize(
    ("text", "layer_ids"),
    [
        (",e0,e1,e2,e3\n0,5,1,2,4\n1,3,3,0,6\n", (0, 1)),  # pandas: to_csv()
        (",0,1,2,3\n0,5,1,2,4\n1,3,3,0,6\n", (0, 1)),
        (",layer,e0,e1,e2,e3\n0,3,5,1,2,4\n1,4,3,3,0,6\n", (3, 4)),
        ("Unnamed: 0,e0,e1,e2,e3\n3,5,1,2,4\n4,3,3,0,6\n", (3, 4)),
        ("0,1,2,3\n5,1,2,4\n3,3,0,6\n", (0, 1)),
        ("Layer ID,1,2,3,4\n1,5,1,2,4\n2,3,3,0,6\n", (1, 2)),
        ("layer_index;e0;e1;e2;e3\n7;5;1;2;4\n8;3;3;0;6\n", (7, 8)),
        (
            "MoE-Layer No.\texpert_0\texpert_1\texpert_2\texpert_3\n1\t5\t1\t2\t4\n2\t3\t3\t0\t6",
            (1, 2),
        ),
        ('"layerId","Expert 0","Expert 1","Expert 2","Expert 3"\n0,5,1,2,4\n1,3,3,0,6\n', (0, 1)),
        ("e0,e1,e2,e3,layer\n5,1,2,4,3\n3,3,0,6,4\n", (3, 4)),
        ("e3,e1,e2,e0\n4,1,2,5\n6,3,0,3\n", (0, 1)),
        ("layer,e0,e1,e2,e3\n4,3,3,0,6\n3,5,1,2,4\n", (3, 4)),
        ("layer,V1,V2,V3,V4\nlayer_3,5,1,2,4\nlayer_4,3,3,0,6\n", (3, 4)),
        ("L3,5,1,2,4\nL4,3,3,0,6\n", (3, 4)),
        ("layer,e0,e1,e2,e3,total\n0,5,1,2,4,12\n1,3,3,0,6,12\n", (0, 1)),
        ("e0,e1,e2,e3,\n5,1,2,4,\n3,3,0,6,\n", (0, 1)),
        ("5.0e+00 1.0e+00 2 4\n3 3 0 6\n", (0, 1)),  # numpy: savetxt()
    ],
)
def test_names_and_ids_beside_loads_are_no_loads(tmp_path, text, layer_ids):
    loads = read(tmp_path, text)
    assert loads.loads_LE.tolist() == LOADS.tolist()
    assert loads.layer_ids == layer_ids


@pytest.mark.parametrize(
    ("header", "match"),
    [
        ("time,e0,e1,e2", "column 1, 'time', is neither the layers"),
        ("step,e0,e1,e2", "'step'"),
        ("rank0,rank1,rank2,rank3", "'rank0'"),
        ("layer,hits,e1,e2", "'hits'"),
        ("layer,expert,tokens,rank", "'expert' has expert ids; pivot"),
        ("expert,layer_0,layer_1,layer_2", "'expert' has expert ids; transpose"),
        ("layer_0,layer_1,layer_2,layer_3", "'layer_0' is a layer; transpose"),
        ("slot0,slot1,slot2,slot3", "physical slot"),
        ("layer,layer_id,e0,e1", "both have layers"),
        ("layer,e0,e0,e1", "are one expert"),
        ("layer,e0,e1,e3", "no expert 2, but 'e3'"),
        ("layer,e4,e5,e6", "no expert 1, but 'e6'"),
        ("x,800,0,0", "column 1, 'x'"),
        ("1,2,3,4", "line 1 counts from 1 to 4, as a header would"),
    ],
)
def test_a_header_of_anything_but_layers_and_experts_is_refused(tmp_path, header, match):
    refused(tmp_path, match, header + "\n7,1,2,4\n9,3,0,6\n")


def test_a_total_that_is_not_the_sum_says_that_experts_are_missing(tmp_path):
    refused(
        tmp_path, "line 2: 'total' is 20, but the experts add up to 12", "e0,e1,total\n4,8,20\n"
    )


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("column", "match"),
    [
        (np.arange(6), "counts 0, 1, ... as ids do"),
        (np.arange(3, 9), "counts 3, 4, ... as ids do"),
        (np.arange(6) * 60 + 1_700_000_000, "as ids do"),
        (1_700_000_000 + np.array([1, 5, 2, 9, 4, 8]), "numbers like 1700000001, a time or an id"),
        (EIGHT.sum(axis=1), "is the sum of the others in every row, a total"),
    ],
)
def test_a_column_without_a_name_that_is_no_load_is_refused(tmp_path, column, match, first):
    table = with_column(column, first)
    refused(tmp_path, f"column {1 if first else 9} .*{match}", lines(table))
    np.save(tmp_path / "loads.npy", table)
    refused(tmp_path / "loads.npy", match)
    settled = read(tmp_path, lines(table), declared=Declared(num_experts=9))
    assert settled.num_experts == 9, "who says how many experts there are is believed"


def test_a_total_between_other_columns_and_a_row_of_totals_are_refused(tmp_path):
    table = np.insert(EIGHT, 3, EIGHT.sum(axis=1), axis=1)
    refused(tmp_path, "column 4 is the sum of the others", lines(table))
    table = np.vstack([EIGHT, EIGHT.sum(axis=0)])
    refused(tmp_path, "row 7 is the sum of the others", lines(table))


def test_layers_with_few_busy_experts_are_no_totals_and_no_ids(tmp_path):
    for table in ([[4, 4, 0, 0], [0, 0, 0, 9]], [[7, 7], [5, 5]], np.arange(12).reshape(3, 4) + 5):
        assert read(tmp_path, lines(table)).loads_LE.tolist() == np.asarray(table).tolist()


@pytest.mark.parametrize("times", [2, 20])
def test_tables_one_after_the_other_are_not_more_layers(tmp_path, times):
    rng = np.random.default_rng(3)
    table = np.concatenate([rng.poisson(EIGHT) for _ in range(times)])
    match = f"{6 * times} rows, and each is like the one 6 further down: tables of 6 layers"
    refused(tmp_path, match, lines(table))
    np.save(tmp_path / "loads.npy", table)
    refused(tmp_path / "loads.npy", match)
    assert read(tmp_path, lines(table), declared=Declared(num_layers=len(table))).num_experts == 8


def test_layers_that_are_all_alike_are_layers(tmp_path):
    assert read(tmp_path, lines(np.tile(EIGHT[:1], (12, 1)))).num_layers == 12


def test_more_rows_than_any_model_has_layers_are_steps(tmp_path):
    table = np.random.default_rng(1).integers(1, 99, (600, 8))
    refused(tmp_path, "600 rows are more than any model has layers", lines(table))


def test_a_layer_that_comes_again_names_both_lines(tmp_path):
    text = "layer,e0,e1\n0,4,2\n1,3,3\n0,5,1\n1,2,4\n"
    refused(tmp_path, "line 4: layer 0 again, after line 2", text)


def test_a_row_that_is_no_layer_is_refused(tmp_path):
    text = "layer,e0,e1\n0,4,2\n1,3,3\ntotal,7,5\n"
    refused(tmp_path, "line 4: 'total' is not a layer", text)


def test_a_table_the_wrong_way_round_is_refused(tmp_path):
    refused(tmp_path, "all 6 columns have the same sum and the 8 rows have not", lines(EIGHT.T))
    refused(
        tmp_path,
        "8 rows and 6 columns, but the model has 6 layers of 8 experts: transpose",
        lines(EIGHT.T),
        declared=Declared(num_layers=6, num_experts=8),
    )


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('"1,234",5\n6,7\n', "'1,234' is not a number; write 1234.5 so"),
        ("1,5;2,5\n3;4\n", "'1,5' is not a number; write"),
        ("1.234;5.678\n910;11\n", "'1.234' may be 1234 or a fraction"),
        ("5,,2\n3,3,0\n", "line 1, column 2: an empty cell"),
        ("5,nan\n3,3\n", "layer 0, expert 1: load nan"),
        ("5,inf\n3,3\n", "load inf"),
        ("5,-1\n3,3\n", "load -1"),
        ("2024-01-01,5\n2024-01-02,3\n", "'2024-01-01' is not a number"),
    ],
)
def test_a_cell_that_may_be_several_numbers_or_none_is_refused(tmp_path, text, match):
    refused(tmp_path, match, text)


def test_points_beside_semicolons_are_fractions_where_they_cannot_be_thousands(tmp_path):
    assert read(tmp_path, "0.125;1.5\n").loads_LE.tolist() == [[0.125, 1.5]]


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_what_is_compressed_is_read_as_what_is_in_it(tmp_path, pack):
    plain = lines(LOADS).encode()
    (tmp_path / "loads.csv.gz").write_bytes(pack(plain))
    loads = read(tmp_path / "loads.csv.gz")
    assert loads.loads_LE.tolist() == LOADS.tolist()
    assert loads.source == "loads.csv.gz (CSV)"
    (tmp_path / "cut.gz").write_bytes(pack(plain * 99)[:40])
    refused(tmp_path / "cut.gz", "cut.gz: cannot be read .*copy it again")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
@pytest.mark.parametrize("name", ["csv", "json"])
def test_marks_of_byte_order_are_understood(tmp_path, encoding, name):
    text = (
        lines(LOADS) if name == "csv" else str({"logical_count": LOADS.tolist()}).replace("'", '"')
    )
    (tmp_path / "loads").write_bytes(text.encode(encoding))
    assert read(tmp_path / "loads").loads_LE.tolist() == LOADS.tolist()


def test_an_excel_workbook_says_what_to_do(tmp_path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "loads.xlsx", "w") as archive:
        archive.writestr("xl/workbook.xml", "")
    refused(tmp_path / "loads.xlsx", "an Excel workbook; save its sheet as CSV")
