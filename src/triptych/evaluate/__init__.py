"""Evaluation: the perplexity of a text of one's own, and lm-eval's tasks (extra `eval`)."""

from .perplexity import Perplexity, perplexity, windows

__all__ = ["Perplexity", "perplexity", "windows"]
