"""Answers of the OpenAI-compatible endpoints, whole and in chunks."""
