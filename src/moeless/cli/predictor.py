"""``moeless predictor``: profile, train, evaluate and apply predictors of expert loads."""

import click

from moeless.cli.predictor_fit import profile, train
from moeless.cli.predictor_use import apply, evaluate


@click.group()
def predictor() -> None:
    """Predictors of expert loads: see how far gates look ahead, and re-fit them to look further.

    \b
    Examples:
      moeless record MODEL --prompts chats.jsonl --gate-inputs seen/ --max-tokens 32
      moeless predictor profile seen/
      moeless predictor train seen/ --distance 2 --out ahead2/
      moeless predictor evaluate ahead2/ seen/
      moeless predictor apply ahead2/ seen/ --out trace.npz
    """


for command in (profile, train, evaluate, apply):
    predictor.add_command(command)
