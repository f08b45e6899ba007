"""Request bodies of the OpenAI-compatible endpoints."""
