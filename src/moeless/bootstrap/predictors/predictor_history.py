"""Shows predictors that look back over loads to the evaluation of those that look ahead."""

import numpy as np

from moeless.learned.evaluation import History, Loads
from moeless.policies.predictors import PREDICTORS


def replay_history(name: str) -> History:
    """What a predictor that looks back expects of batches in a row.

    Args:
        name: Of the registry of predictors, such as ``previous`` or ``ewma``.

    Returns:
        From true loads [N, L, E] to expected ones; uniform where nothing is known yet.
    """

    def expect(actual_NLE: Loads) -> Loads:
        predictor = PREDICTORS.create(name)
        expected_NLE = np.ones_like(actual_NLE)
        for step, actual_LE in enumerate(actual_NLE):
            for layer, actual_E in enumerate(actual_LE):
                expected_E = predictor.predict(step=step, layer=layer)
                if expected_E is not None:
                    expected_NLE[step, layer] = expected_E
                predictor.observe(step=step, layer=layer, load_E=actual_E)
        return expected_NLE

    return expect
