"""Reading arrival traces."""

import numpy as np
import pytest

from moeless.errors import TraceError
from moeless.workloads.arrivals import Arrivals, read_arrivals

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
ROWS = ("2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951690,396,109")


def write(tmp_path, *lines, end="\n"):
    path = tmp_path / "arrivals.csv"
    path.write_bytes(end.join(lines).encode())
    return path


def test_times_count_from_the_first_arrival_with_all_their_digits(tmp_path):
    arrivals = read_arrivals(write(tmp_path, HEADER, *ROWS))
    assert arrivals.time_s_R.tolist() == [0.0, 4.314579]
    assert arrivals.prompt_tokens_R.tolist() == [374, 396]
    assert arrivals.generated_tokens_R.tolist() == [44, 109]
    assert len(arrivals) == 2


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("tail", [(), ("",), ("", "  ", ",,", "")])
def test_line_ends_and_trailing_blank_lines_do_not_matter(tmp_path, end, tail):
    assert len(read_arrivals(write(tmp_path, HEADER, *ROWS, *tail, end=end))) == 2


@pytest.mark.parametrize(
    ("header", "row"),
    [
        ("timestamp,contexttokens,generatedtokens", "2023-11-16 18:15:46.5,7,9"),
        ("\ufeffTIMESTAMP , ContextTokens, GeneratedTokens", "2023-11-16T18:15:46.5, 7 , 9"),
        ("GeneratedTokens,id,TIMESTAMP,ContextTokens", "9,x,2023-11-16 18:15:46,7"),
        (HEADER, "2024-05-10 00:00:00.009930+00:00,7,9"),
        (HEADER, '"2024-05-10 00:00:00Z","7","9"'),
    ],
)
def test_headers_and_times_are_read_in_the_forms_that_are_published(tmp_path, header, row):
    arrivals = read_arrivals(write(tmp_path, header, row))
    assert arrivals.prompt_tokens_R.tolist() == [7]
    assert arrivals.generated_tokens_R.tolist() == [9]


def test_a_time_just_before_a_full_second_stays_in_its_second(tmp_path):
    path = write(
        tmp_path,
        HEADER,
        "2023-11-16 18:15:46.6805901,1,1",
        "2023-11-16 18:15:47.6805900,1,1",
        "2023-11-16 18:15:47.6805901,1,1",
    )
    assert np.floor(read_arrivals(path).time_s_R).tolist() == [0, 0, 1]


def test_time_zones_are_respected(tmp_path):
    path = write(tmp_path, HEADER, "2024-05-10 00:00:00,1,1", "2024-05-10 02:00:01+02:00,1,1")
    assert read_arrivals(path).time_s_R.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ("yesterday,1,1", "TIMESTAMP is 'yesterday'"),
        ("2023-13-16 18:15:46,1,1", "TIMESTAMP is '2023-13-16 18:15:46'"),
        ("2023-11-16,1,1", "TIMESTAMP"),
        (",1,1", "TIMESTAMP is ''"),
        ("2023-11-16 18:15:51,1.5,1", "ContextTokens is '1.5'"),
        ("2023-11-16 18:15:51,-1,1", "ContextTokens is '-1'"),
        ("2023-11-16 18:15:51,1,", "GeneratedTokens is ''"),
        ("2023-11-16 18:15:51,1,nan", "GeneratedTokens is 'nan'"),
        ("2023-11-16 18:15:51,1,9999999999", "GeneratedTokens is '9999999999'"),
        ("2023-11-16 18:15:51,1", "2 columns; the header promises at least 3"),
        ("2023-11-16 18:15:47,1,1", "TIMESTAMP goes back"),
        ("2023-11-16 18:15:51,1,1" + "0" * 200_000, "not CSV"),
    ],
)
def test_a_wrong_row_is_named_by_its_line(tmp_path, row, wanted):
    path = write(tmp_path, HEADER, *ROWS, "", row)
    with pytest.raises(TraceError) as caught:
        read_arrivals(path)
    message = str(caught.value)
    assert message.startswith(f"{path}, line 5: ")
    assert wanted in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "lines", [(), ("",), ("a,b,c",), (ROWS[0],), ("TIMESTAMP,ContextTokens",)]
)
def test_a_missing_column_is_named(tmp_path, lines):
    with pytest.raises(TraceError, match=r"line 1: the header lacks .*GeneratedTokens"):
        read_arrivals(write(tmp_path, *lines))


def test_a_trace_without_requests_is_refused(tmp_path):
    with pytest.raises(TraceError, match="no requests after the header"):
        read_arrivals(write(tmp_path, HEADER, ""))


def test_what_is_no_text_file_is_refused(tmp_path):
    with pytest.raises(TraceError, match="no such file"):
        read_arrivals(tmp_path / "missing.csv")
    with pytest.raises(TraceError, match="is a directory"):
        read_arrivals(tmp_path)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(TraceError, match="not a text file"):
        read_arrivals(tmp_path / "binary.csv")


@pytest.mark.parametrize("times", [[1.0, 2.0], [0.0, 2.0, 1.0], [0.0, np.nan], []])
def test_arrivals_ascend_from_zero(times):
    counts = np.ones(len(times), dtype=np.int64)
    with pytest.raises(TraceError):
        Arrivals(time_s_R=np.array(times), prompt_tokens_R=counts, generated_tokens_R=counts)
