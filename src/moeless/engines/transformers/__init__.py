"""The engine on Hugging Face transformers: any Mixture-of-Experts causal language model."""
