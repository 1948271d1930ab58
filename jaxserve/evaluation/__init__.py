"""Evaluation of a model: perplexity, multiple choice by log-likelihood, and answers by generation."""

from jaxserve.evaluation.command import main

__all__ = ["main"]
