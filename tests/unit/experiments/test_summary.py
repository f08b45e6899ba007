from moeless_experiments.summary import listed, span, spread


def test_many_cases_become_least_most_and_median():
    assert spread([0.1, -0.2, 0.0]) == "-20.0% to +10.0%, median 0.0% of 3"
    assert spread([0.0001, -0.0001]) == "0.0% in all 2"
    assert spread([0.123]) == "+12.3%"


def test_a_span_of_equal_ends_is_one_number():
    assert span([1.001, 1.002]) == "1.00"
    assert span(iter([2, 1, 3]), ".0f") == "1 to 3"


def test_cases_are_listed_by_name():
    assert listed({"a": 0.5, "b": -1.0}, "+.0%") == {"a": "+50%", "b": "-100%"}
