"""MoEless: serverless expert serving for Mixture-of-Experts language models.

Importing this package is cheap: it loads neither torch nor transformers.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
