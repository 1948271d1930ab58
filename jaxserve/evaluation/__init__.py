"""Evaluation of a model: perplexity, multiple choice by log-likelihood, and answers by generation."""

from jaxserve.evaluation.cli import main

__all__ = ["main"]
