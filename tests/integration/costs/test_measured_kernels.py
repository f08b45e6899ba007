import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow")

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "validate_kernels.py"
DATA = os.environ.get("MOELESS_DATA_DIR")
KERNELS = Path(DATA or ".") / "kernels" / "h200_vllm022_moe.parquet"

pytestmark = pytest.mark.skipif(
    not (DATA and KERNELS.is_file()), reason="MOELESS_DATA_DIR has no measured kernels"
)


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("validate_kernels", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("model", ["mixtral-8x7b", "llama-4-scout"])
@pytest.mark.parametrize(("fitted", "predicted"), [(1.01, 1.2), (1.2, 1.01)])
def test_loads_of_one_exponent_predict_kernel_times_of_the_other(
    benchmark, model, fitted, predicted
):
    cases = benchmark.read_cases(KERNELS, model, draws=50, seed=0)
    found = benchmark.fit(cases.of(cases.exponent_N == fitted))
    error_N = benchmark.errors(found, cases.of(cases.exponent_N == predicted))
    assert len(error_N) >= 60
    assert np.median(error_N) <= 0.10
    assert np.quantile(error_N, 0.9) <= 0.25
