"""Predictors: the load of a layer, expected from what was observed before."""

from moeless.core.ports import Predictor
from moeless.policies.registry import Registry

PREDICTORS: Registry[Predictor] = Registry(
    "predictor",
    {
        "ewma": "moeless.policies.predictors.ewma:EwmaPredictor",
        "previous": "moeless.policies.predictors.previous:PreviousPredictor",
        "window": "moeless.policies.predictors.window:WindowPredictor",
    },
)
